// One token per row of logits: greedy, or the inverse CDF over the ids that top-k, top-p and min-p leave.
//
// The first pass takes the maximum of every block of 128 ids; what follows skips blocks that cannot matter. The row lies
// in the second cache by then, and while its weights are computed the next row is fetched.
#include "cpu/kernels.h"
#include "cpu/philox.h"
#include "cpu/sampler_edits.h"
#include "cpu/sampler_guess.h"
#include "cpu/scratch.h"

namespace pagemill::PAGEMILL_LEVEL {
namespace {

// What may be drawn: the ranking up to `last`, of that what weighs at least min_weight (before rounding).
struct Kept {
  Rank last;
  float min_weight;
};

// floor(bits * total / 2^53): the draw's place in [0, total).
int64_t place(uint64_t bits, int64_t total) {
  return int64_t((unsigned __int128)bits * (unsigned __int128)(uint64_t)total >> 53);
}

// By block_sums, the weights of what is kept in each block.
int64_t draw_from_blocks(const Row& row, const Scale& scale, const Rank& last, uint64_t bits) {
  int64_t total = 0, b = 0;
  for (int64_t i = 0; i < row.blocks; ++i) total += row.block_sums[i];
  int64_t left = place(bits, total);
  while (row.block_sums[b] <= left) left -= row.block_sums[b++];
  float copy[kBlock], weights[kBlock];
  const float* block = row.block(b, copy);
  for (int64_t i = 0; i < kBlock; i += kLanes) {
    const Vec v = load(block + i);
    store(weights + i, only(last.includes(v, row.ids(b * kBlock + i)), scale(v)));
  }
  int64_t i = 0;
  for (int64_t w = quantise(weights[0]); w <= left; w = quantise(weights[++i])) left -= w;
  return b * kBlock + i;
}

int64_t draw_from_candidates(const Candidates& c, uint64_t bits) {
  int64_t left = place(bits, total_weight(c)), i = 0;
  for (int64_t w = quantise(c.weight[0]); w <= left; w = quantise(c.weight[++i])) left -= w;
  return c.id[i];
}

struct Draw {
  float temperature, top_p, min_p;
  int64_t top_k;
  uint64_t bits;
};

// The scale under which what min-p leaves out weighs nothing. The margin covers the exponential's last bits.
Scale scale_with(float max, float temperature, float min_p) {
  Scale scale{max, temperature, min_p * kUnit};
  if (min_p > 1e-13f) scale.least = float(__builtin_log(double(min_p))) - 1e-3f;
  return scale;
}

// The drawn id; `kept` becomes what it was drawn from.
int64_t draw(Row& row, const Draw& d, Kept& kept) {
  const bool has_k = d.top_k > 0 && d.top_k < row.vocab, has_p = d.top_p < 1.0f;
  const Scale whole{row.max, d.temperature}, cut = scale_with(row.max, d.temperature, d.min_p);
  kept = {kEverything, cut.min_weight};
  if (has_k) {
    Candidates& c = row.candidates;
    kept.last = keep_top_k(row, d.top_k);
    weigh(c, whole);
    if (has_p) {
      kept.last = last_of_prefix<SumWeights>(c, row.work, target_mass(d.top_p, total_weight(c)));
      keep(c, kept.last);
    }
    weigh(c, cut);
    return draw_from_candidates(c, d.bits);
  }
  const bool is_rough = can_estimate(d.temperature);
  if (has_p) {
    if (is_rough && keep_few(row, whole, d.top_p, kept.last)) {
      weigh(row.candidates, cut);
      return draw_from_candidates(row.candidates, d.bits);
    }
    kept.last = keep_top_p(row, whole, d.top_p);
    if (whole(splat(kept.last.logit))[0] >= cut.min_weight) return draw_from_blocks(row, whole, kept.last, d.bits);
  }
  if (cut.min_weight > 0.5f) {  // min-p is stricter than top-p, if that is there
    gather(row, logit_below(row, cut, double(cut.least)));
    weigh(row.candidates, cut);
    return draw_from_candidates(row.candidates, d.bits);
  }
  if (is_rough) {
    const int64_t id = draw_from_estimate(row, whole, estimate(row, whole), d.bits);
    if (id >= 0) return id;
  }
  weigh_blocks<false>(row, whole);
  return draw_from_blocks(row, whole, kEverything, d.bits);
}

// The exponents of what is kept, -inf elsewhere.
void tell_drawn(const Row& row, float temperature, const Kept& kept, float* out) {
  for (int64_t i = 0; i < row.vocab; i += kLanes) {
    const Vec v = load_up_to(row.logits + i, row.vocab - i), exponent = (v - row.max) / temperature;
    const Mask heavy = at_least(weight_exp(exponent), splat(kept.min_weight));
    const Mask chosen = (Mask)(kept.last.includes(v, row.ids(i)) & heavy);
    store_up_to(out + i, choose(chosen, exponent, splat(-kInfinity)), row.vocab - i);
  }
}

int64_t sample_row(Row& row, const SampleArgs& a, int64_t r) {
  float* drawn = a.drawn_at != nullptr && a.drawn_at[r] >= 0 ? a.drawn + a.drawn_at[r] * a.vocab : nullptr;
  if (a.greedy[r]) {
    if (drawn != nullptr) copy_allowed(row.logits, drawn, row.vocab, nullptr, 0);
    return first_of_max(row);
  }
  const uint64_t bits = random_bits(uint64_t(a.seed_keys[r]), uint64_t(a.positions[r]));
  Kept kept;
  const int64_t id = draw(row, {a.temperature[r], a.top_p[r], a.min_p[r], a.top_k[r], bits}, kept);
  if (drawn != nullptr) tell_drawn(row, a.temperature[r], kept, drawn);
  return id;
}

// The edited row is scanned. If the edits leave nothing of what the mask allows, the mask alone counts.
bool scan_edited(Row& row, const SampleArgs& a, int64_t r, float* edited) {
  const float* logits = row.logits;
  row.logits = edited;
  if (!scan(row)) return false;
  const int32_t* mask = mask_of(a.edits, r);
  if (row.max > -kInfinity || mask == nullptr) return true;
  copy_allowed(logits, edited, a.vocab, mask, a.edits.mask_words);
  return scan(row);
}

}  // namespace

void sample(const SampleArgs& args, int64_t row_begin, int64_t row_end) {
  bool some_edited = false;
  for (int64_t r = row_begin; r < row_end; ++r) some_edited |= is_edited(args.edits, r);
  const int64_t extra = some_edited ? aligned(args.vocab * 4) : 0;  // a copy of the row, and a count per id
  char* scratch = static_cast<char*>(thread_scratch(size_t(row_bytes(args.vocab) + 2 * extra)));
  Row row = make_row(args.vocab, scratch + 2 * extra);
  float* edited = reinterpret_cast<float*>(scratch);
  int32_t* counts = reinterpret_cast<int32_t*>(scratch + extra);
  __builtin_memset(counts, 0, size_t(extra));
  auto logits_of = [&](int64_t r) { return args.logits + (args.source == nullptr ? r : args.source[r]) * args.stride; };
  for (int64_t r = row_begin; r < row_end; ++r) {
    row.logits = logits_of(r);
    row.next = r + 1 < row_end ? logits_of(r + 1) : nullptr;
    const bool is_changed = is_edited(args.edits, r);
    if (is_changed && !edit(args.edits, r, row.logits, edited, args.vocab, counts)) {
      args.ids[r] = -2;
      continue;
    }
    const bool is_sound = is_changed ? scan_edited(row, args, r, edited) : scan(row);
    args.ids[r] = is_sound && is_finite(row.max) ? sample_row(row, args, r) : -1;
  }
}

}  // namespace pagemill::PAGEMILL_LEVEL
