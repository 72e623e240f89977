// Ops that read and choose the instruction-set level.
#include "cpu/isa.h"

#include "check.h"
#include "op_list.h"

namespace pagemill {

std::string isa() { return level_name(); }

std::string isa_levels() { return available_levels(); }

void set_isa(std::string name) {
  if (!set_level(name)) {
    fail("set_isa", "name", "wanted auto or one of ", available_levels(),
         " (what this machine and build have), got ", name);
  }
}

}  // namespace pagemill
