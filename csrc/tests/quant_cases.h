// The cases of the quantised linear layer, without torch or Python; portable_cases.cpp runs them.
#pragma once

#include <string>

namespace pagemill {

// On the active level. Prints what failed under the level's name; returns the number of failed cases.
int run_quant_cases(const std::string& level);

}  // namespace pagemill
