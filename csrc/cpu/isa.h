// Which instruction-set level's kernels run: the best the machine has, unless set_level says otherwise.
//
// The level is process-wide and is chosen before the first weights are packed; changing it later is for tests.
#pragma once

#include <string>

#include "cpu/kernels.h"

namespace pagemill {

const KernelTable& kernels();        // of the active level
std::string level_name();            // of the active level
std::string available_levels();      // comma-separated, worst to best, then those that only tests choose
bool set_level(const std::string& name);  // "auto" is the best; false: this machine or build lacks it

}  // namespace pagemill
