// Work items: normally one per (sequence, kv head, tile of queries), each walking its splits. When there are too few
// to keep the threads busy (one long decode), one per split as well, whose results are merged afterwards by the
// same left-to-right merge.
#include "cpu/attention_plan.h"

#include "cpu/scratch.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

namespace pagemill {
namespace {

constexpr int64_t kItemRows = 48;        // rows that share one pass over the keys
constexpr int64_t kItemsPerThread = 4;   // below this, items are cut by split
constexpr int64_t kMaxPartialBytes = int64_t(64) << 20;  // above this they are not: the results are the same

struct Aligned {
  void operator()(char* memory) const { ::operator delete[](memory, std::align_val_t{64}); }
};
using AlignedBytes = std::unique_ptr<char[], Aligned>;

AlignedBytes allocate(int64_t bytes) {
  return AlignedBytes(static_cast<char*>(::operator new[](static_cast<size_t>(bytes), std::align_val_t{64})));
}

std::vector<AttentionItem> make_items(const AttentionArgs& args, int64_t num_seqs, int64_t queries_per_item) {
  std::vector<AttentionItem> items;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t queries = args.query_start[seq + 1] - args.query_start[seq], seq_len = args.seq_lens[seq];
    // Late queries see more keys: they go first, so that the threads end together.
    for (int64_t tile = (queries + queries_per_item - 1) / queries_per_item - 1; tile >= 0; --tile) {
      const int64_t begin = tile * queries_per_item, end = std::min(queries, begin + queries_per_item);
      const int64_t first = visible_keys(args, seq_len - queries + begin, seq_len).begin;
      const int64_t last = std::max<int64_t>(visible_keys(args, seq_len - queries + end - 1, seq_len).end, 0);
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        items.push_back({static_cast<int32_t>(seq), static_cast<int32_t>(head), static_cast<int32_t>(begin),
                         static_cast<int32_t>(end), static_cast<int32_t>(first / kSplitTokens),
                         static_cast<int32_t>((last + kSplitTokens - 1) / kSplitTokens), nullptr});
      }
    }
  }
  return items;
}

// Calls work(index, scratch) for every index, in order of the shared counter; one scratch per thread.
template <typename Work>
void drain(const Threads& threads, int64_t count, int64_t scratch_bytes, const Work& work) {
  struct Context {
    const Work* work;
    int64_t count, scratch_bytes;
    std::atomic<int64_t> next{0};
  } context{&work, count, scratch_bytes};
  const int64_t workers = std::max<int64_t>(1, std::min(threads.num_threads, count));
  threads.parallel(workers, [](int64_t, int64_t, void* pointer) {
    Context& shared = *static_cast<Context*>(pointer);
    char* scratch = static_cast<char*>(thread_scratch(shared.scratch_bytes));
    for (int64_t i = shared.next++; i < shared.count; i = shared.next++) (*shared.work)(i, scratch);
  }, &context);
}

}  // namespace

void run_attention(const KernelTable& table, const AttentionArgs& args, int64_t num_seqs, const Threads& threads) {
  const int64_t queries_per_item = std::max<int64_t>(1, kItemRows / args.group);
  const std::vector<AttentionItem> items = make_items(args, num_seqs, queries_per_item);
  const int64_t count = static_cast<int64_t>(items.size());
  int64_t total = 0, work = 0, max_rows = 0;
  for (const AttentionItem& item : items) {
    const int64_t splits = item.split_end - item.split_begin, rows = (item.query_end - item.query_begin) * args.group;
    total += splits;
    max_rows = std::max(max_rows, rows);
    work += splits * (rows + 6) * kSplitTokens * (args.key_dim + args.value_dim);  // 6: what reading the keys costs
  }
  const int64_t scratch_bytes = attention_scratch_bytes(max_rows, args.key_dim, args.value_dim);
  const bool alone = threads.num_threads == 1 || work < threads.alone_below;
  const Threads used{alone ? 1 : threads.num_threads, 0, threads.parallel};
  const int64_t floats = padded_rows(max_rows) * partial_floats(args.value_dim);
  if (alone || count >= kItemsPerThread * threads.num_threads || total * floats * 4 > kMaxPartialBytes) {
    drain(used, count, scratch_bytes, [&](int64_t i, char* scratch) { table.attend(args, items[i], scratch); });
    return;
  }
  const AlignedBytes memory = allocate(std::max<int64_t>(total, 1) * floats * 4);
  float* next = reinterpret_cast<float*>(memory.get());
  std::vector<AttentionItem> merges = items, pieces;
  for (AttentionItem& item : merges) {
    item.partials = next;
    for (int32_t split = item.split_begin; split < item.split_end; ++split, next += floats) {
      pieces.push_back({item.seq, item.kv_head, item.query_begin, item.query_end, split, split + 1, next});
    }
  }
  drain(used, static_cast<int64_t>(pieces.size()), scratch_bytes,
        [&](int64_t i, char* scratch) { table.attend(args, pieces[i], scratch); });
  const bool few = total * max_rows * args.value_dim < threads.alone_below;
  const Threads mergers{few ? 1 : threads.num_threads, 0, threads.parallel};
  drain(mergers, count, scratch_bytes,
        [&](int64_t i, char* scratch) { table.merge_splits(args, merges[i], floats, scratch); });
}

}  // namespace pagemill
