// Cuts a ragged batch into work items and runs them; knows neither torch nor instruction sets.
#pragma once

#include <cstdint>

#include "cpu/attention.h"
#include "cpu/kernels.h"

namespace pagemill {

// How loops run: body(begin, end, context) over disjoint ranges of [0, count), from up to num_threads threads.
struct Threads {
  int64_t num_threads;
  int64_t alone_below;  // multiply-adds: less is done by the calling thread before a second one is awake
  void (*parallel)(int64_t count, void (*body)(int64_t, int64_t, void*), void* context);
};

void run_attention(const KernelTable& table, const AttentionArgs& args, int64_t num_seqs, const Threads& threads);

}  // namespace pagemill
