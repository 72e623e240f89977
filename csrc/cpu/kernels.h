// The table of kernels that every instruction-set level fills in, and what its entries take.
//
// A kernel file (cpu/NAME.cpp) is compiled once per level, with that level's -m flags, into the namespace
// pagemill::PAGEMILL_LEVEL. Because of that it includes neither torch nor the C++ library beyond <cstdint>, <cstddef>,
// <cstring> and <cmath>'s builtins: an inline function shared by two levels is merged by the linker into one copy, and
// the copy with AVX-512 in it would run on a machine that has none (tests/ops/test_isa.py looks for it). Helpers go
// into an anonymous namespace or the level's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/activation.h"
#include "cpu/attention.h"
#include "cpu/cache.h"
#include "cpu/linear.h"
#include "cpu/linear_quant.h"
#include "cpu/logits.h"
#include "cpu/norm.h"
#include "cpu/rotary.h"
#include "cpu/sampler.h"

// One line per kernel: its name and parameters. All return nothing.
#define PAGEMILL_KERNELS(KERNEL) \
  KERNEL(write_cache, (const pagemill::CacheWrite& args, int64_t token_begin, int64_t token_end)) \
  KERNEL(attend_piece, (const pagemill::AttentionArgs& args, const pagemill::AttentionPiece& piece, char* scratch)) \
  KERNEL(attend_merge, (const pagemill::AttentionArgs& args, const pagemill::AttentionMerge& merge, char* scratch)) \
  KERNEL(pack_linear, (const pagemill::PackArgs& args, int64_t panel_begin, int64_t panel_end)) \
  KERNEL(linear, (const pagemill::LinearArgs& args, int64_t* next)) \
  KERNEL(pack_linear_quant, (const pagemill::PackQuantArgs& args, int64_t panel_begin, int64_t panel_end)) \
  KERNEL(linear_quant, (const pagemill::LinearArgs& args, pagemill::QuantFormat format, int64_t* next)) \
  KERNEL(embed_quant, (const pagemill::EmbedQuantArgs& args, int64_t token_begin, int64_t token_end)) \
  KERNEL(rms_norm, (const pagemill::NormArgs& args, int64_t row_begin, int64_t row_end)) \
  KERNEL(rotate, (const pagemill::RotaryArgs& args, int64_t token_begin, int64_t token_end)) \
  KERNEL(embed, (const pagemill::EmbedArgs& args, int64_t token_begin, int64_t token_end)) \
  KERNEL(activation, (const pagemill::ActivationArgs& args, int64_t begin, int64_t end)) \
  KERNEL(gated_activation, (const pagemill::ActivationArgs& args, int64_t row_begin, int64_t row_end)) \
  KERNEL(shape_logits, (const pagemill::LogitArgs& args, int64_t begin, int64_t end)) \
  KERNEL(sample, (const pagemill::SampleArgs& args, int64_t row_begin, int64_t row_end)) \
  KERNEL(logprobs_of, (const pagemill::LogprobArgs& args, int64_t row_begin, int64_t row_end))

namespace pagemill {

struct KernelTable {
#define PAGEMILL_POINTER(name, parameters) void(*name) parameters;
  PAGEMILL_KERNELS(PAGEMILL_POINTER)
#undef PAGEMILL_POINTER
};

}  // namespace pagemill

#ifdef PAGEMILL_LEVEL
namespace pagemill::PAGEMILL_LEVEL {
#define PAGEMILL_DECLARE(name, parameters) void name parameters;
PAGEMILL_KERNELS(PAGEMILL_DECLARE)
#undef PAGEMILL_DECLARE
}  // namespace pagemill::PAGEMILL_LEVEL
#endif
