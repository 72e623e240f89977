#pragma once
#include "cpu/attention_micro.h"
namespace pagemill::PAGEMILL_LEVEL { namespace {
struct Amx : Dot {};
inline void score_amx(const float* query, int64_t query_stride, int64_t rows, const int32_t* const* tiles,
                    int64_t num_tiles, int64_t steps, float* scores) { score_rows<Dot>(query, query_stride, rows, tiles, num_tiles, steps, scores); }
inline void weigh_amx(const float* probabilities, int64_t rows, const int32_t* const* tiles, int64_t num_tiles,
                    int64_t value_stride, float* out, int64_t out_stride) { weigh_rows<Dot>(probabilities, rows, tiles, num_tiles, value_stride, out, out_stride); }
}}
