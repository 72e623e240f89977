// How attention's work is cut, without kernels: which splits are shared and when a sequence is cut by split.
#pragma once

namespace pagemill {

// Prints what failed; returns the number of failed cases.
int run_plan_cases();

}  // namespace pagemill
