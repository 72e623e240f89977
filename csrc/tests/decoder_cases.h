// The decoder's step against plain loops in double: what portable_cases.cpp runs of it on every level.
#pragma once

#include <string>

namespace pagemill {

// On the active level. Prints what failed under the level's name; returns the number of failed cases.
int run_decoder_cases(const std::string& level);

}  // namespace pagemill
