#include "plan_cases.h"

#include <cstdio>
#include <vector>

#include "cpu/attention_plan.h"

namespace pagemill {
namespace {

// Sequences of blocks of 16 tokens that begin with the same `shared` blocks; the rest is each one's own.
struct Batch {
  int64_t num_seqs, length, queries, shared;
  int64_t kv_heads = 3, group = 3, window = 0;
  int64_t num_threads = 1;
  bool gap = false;  // the second block is each one's own too
};

struct Counts {
  int64_t pieces, merges;
};

Counts cut(const Batch& batch) {
  const int64_t blocks = (batch.length + 15) / 16;
  std::vector<int32_t> tables, starts{0}, lengths;
  for (int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    for (int64_t block = 0; block < blocks; ++block) {
      const bool own = block >= batch.shared || (batch.gap && block == 1);
      tables.push_back(static_cast<int32_t>(own ? (seq + 1) * blocks + block : block));
    }
    starts.push_back(static_cast<int32_t>((seq + 1) * batch.queries));
    lengths.push_back(static_cast<int32_t>(batch.length));
  }
  AttentionArgs args{};
  args.block_tables = tables.data();
  args.query_start = starts.data();
  args.seq_lens = lengths.data();
  args.table_stride = blocks;
  args.num_kv_heads = batch.kv_heads;
  args.group = batch.group;
  args.block_size = 16;
  args.key_dim = args.value_dim = 64;
  args.window = batch.window;
  args.causal = true;
  AttentionPlan plan;
  plan.make(args, batch.num_seqs, batch.num_threads, 0);
  plan.make(args, batch.num_seqs, batch.num_threads, 0);  // as for the next step: nothing of the last one is left
  return {plan.count_pieces(), plan.count_merges()};
}

struct Case {
  const char* name;
  Batch batch;
  Counts wanted;
};

const Case kCases[] = {
    {"16 decodes, one prefix of 4 splits: 48 rows are one group", {16, 1060, 1, 64}, {4 * 3, 16 * 3}},
    {"17 decodes are two groups", {17, 1060, 1, 64}, {2 * 4 * 3, 17 * 3}},
    {"forks share their whole splits", {4, 1060, 1, 66}, {4 * 3, 4 * 3}},
    {"less than a split is not shared", {16, 1060, 1, 15}, {0, 16 * 3}},
    {"only a split's first block is the same", {16, 1060, 1, 64, 3, 3, 0, 1, true}, {0, 16 * 3}},
    {"the last split is not whole", {16, 1023, 1, 64}, {3 * 3, 16 * 3}},
    {"prompt chunks use the keys well alone", {4, 1060, 16, 64}, {0, 4 * 3}},
    {"tiles of 24 rows share", {2, 1060, 8, 64}, {4 * 3, 2 * 3}},
    {"a query that does not see all of a split", {2, 1026, 8, 64}, {3 * 3, 2 * 3}},
    {"a window: one whole split, and before it a piece each", {16, 1060, 1, 64, 3, 3, 300}, {3 + 16 * 3, 16 * 3}},
    {"one head of 100 rows", {2, 1060, 1, 64, 1, 100}, {0, 2}},
    {"one long decode is cut for threads", {1, 1060, 1, 0, 3, 3, 0, 2}, {5 * 3, 3}},
    {"two decodes, shared and cut", {2, 1060, 1, 64, 1, 3, 0, 2}, {4 + 2, 2}},
    {"one split is not cut", {1, 200, 1, 0, 3, 3, 0, 8}, {0, 3}},
};

}  // namespace

int run_plan_cases() {
  int failed = 0;
  for (const Case& c : kCases) {
    const Counts got = cut(c.batch);
    if (got.pieces == c.wanted.pieces && got.merges == c.wanted.merges) continue;
    std::printf("plan: %s: wanted %lld pieces and %lld merges, got %lld and %lld\n", c.name,
                static_cast<long long>(c.wanted.pieces), static_cast<long long>(c.wanted.merges),
                static_cast<long long>(got.pieces), static_cast<long long>(got.merges));
    ++failed;
  }
  return failed;
}

}  // namespace pagemill
