// A factor on the logits, and the cap that some models put on them (Gemma 2, 2024).
//
// The vector at the end goes through the same arithmetic as the whole ones, padded, so a logit's result does not depend
// on where it stands.
#include "cpu/attention_math.h"
#include "cpu/kernels.h"
#include "cpu/lanes_io.h"

namespace pagemill::PAGEMILL_LEVEL {

void shape_logits(const LogitArgs& args, int64_t begin, int64_t end) {
  const bool is_capped = args.softcap > 0;
  const Vec inner = splat(is_capped ? args.scale / args.softcap : args.scale), outer = splat(args.softcap);
  for (int64_t i = begin; i < end; i += kLanes) {
    Vec value = load_up_to(args.logits + i, end - i) * inner;
    if (is_capped) value = tanh(value) * outer;
    store_up_to(args.logits + i, value, end - i);
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
