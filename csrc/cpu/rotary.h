// What the rotary kernel and the embedding kernel take.
#pragma once

#include "cpu/types.h"

namespace pagemill {

struct RotaryArgs {
  char* heads;               // [num_tokens, num_heads, dim], tokens `token_stride` elements apart; rotated in place
  const char* cos;           // [num_positions, rotary_dim]
  const char* sin;           // likewise, the first half negated: the sign of the rotation is in the table
  const int64_t* positions;  // [num_tokens]
  int64_t token_stride;
  int64_t num_heads, dim;
  int64_t rotary_dim;        // even: the first elements of a head, which alone are rotated
  ElementType type;
};

struct EmbedArgs {
  const char* table;     // [vocabulary, dim]
  const int64_t* ids;    // [num_tokens]
  float* out;            // [num_tokens, dim]
  int64_t dim;
  float scale;           // a number of the type; 1: none
  ElementType type;
};

}  // namespace pagemill
