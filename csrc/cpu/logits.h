// What the kernel takes that gives logits their last shape.
#pragma once

#include <cstdint>

namespace pagemill {

struct LogitArgs {
  float* logits;  // contiguous, changed in place: softcap * tanh(scale * logit / softcap)
  float scale;
  float softcap;  // 0: none
};

}  // namespace pagemill
