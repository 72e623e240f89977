// One level's kernel table; isa.cpp picks between them.
#include "cpu/kernels.h"

namespace pagemill::PAGEMILL_LEVEL {

extern const KernelTable kTable;
const KernelTable kTable = {
#define PAGEMILL_ENTRY(name, parameters) name,
    PAGEMILL_KERNELS(PAGEMILL_ENTRY)
#undef PAGEMILL_ENTRY
};

}  // namespace pagemill::PAGEMILL_LEVEL
