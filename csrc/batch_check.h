// What attention and the decoder check of a ragged batch.
#pragma once

#include "check.h"
#include "cpu/attention.h"

namespace pagemill {

// Raises unless the sequences partition the tokens and every visible key lies in a block that exists.
inline void check_batch(const char* op, const AttentionArgs& args, int64_t num_seqs, int64_t max_blocks,
                        int64_t num_blocks, int64_t tokens) {
  if (args.query_start[0] != 0) fail(op, "query_start_loc", "wanted 0 first, got ", args.query_start[0]);
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const int64_t begin = args.query_start[seq], end = args.query_start[seq + 1], seq_len = args.seq_lens[seq];
    if (end < begin || end > tokens) {
      fail(op, "query_start_loc", "wanted ascending offsets up to ", tokens, " tokens, got ", begin, " then ", end);
    }
    if (seq_len < 0 || seq_len > max_blocks * args.block_size) {
      fail(op, "seq_lens", "wanted lengths from 0 to ", max_blocks * args.block_size,
           " (what a row of block_tables holds), got ", seq_len);
    }
    if (begin == end) continue;
    const KeyRange first = visible_keys(args, seq_len - (end - begin), seq_len);
    const int32_t* table = args.block_tables + seq * args.table_stride;
    for (int64_t block = first.begin / args.block_size; block * args.block_size < seq_len; ++block) {
      if (table[block] < 0 || table[block] >= num_blocks) {
        fail(op, "block_tables", "wanted block ids below ", num_blocks, " where keys are visible, got ", table[block],
             " for sequence ", seq, ", block ", block);
      }
    }
  }
}

}  // namespace pagemill
