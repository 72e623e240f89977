// The threads of the decoder and their stages, without kernels.
#pragma once

namespace pagemill {

// To be called while the process has one thread: some cases fork. Prints what failed; returns the number of failed cases.
int run_team_cases();

}  // namespace pagemill
