// Which rows of a step go through what: those whose logits are wanted, and the queries that lead to them.
//
// In the last layer K and V are computed of all tokens, queries only from a sequence's first wanted token on, and what is
// behind attention only of the wanted rows. Rows are independent, so this changes no bit.
#pragma once

#include <cstdint>
#include <vector>

namespace pagemill {

struct AdapterSpan;
struct DecoderBatch;
struct DecoderModel;
struct Product;

// True if all rows are wanted, in their order.
bool takes_all_rows(const DecoderBatch& batch);

// Runs of wanted rows with the same adapter.
std::vector<AdapterSpan> wanted_spans(const DecoderBatch& batch);

// Whether an adapter of `spans` adds to the product.
bool is_adapted(const Product& product, const std::vector<AdapterSpan>& spans);

// The last layer's queries, one behind the other. Keeps its memory for the next step.
struct WantedQueries {
  bool are_few = false;            // else all are computed, and nothing below counts
  std::vector<int32_t> start;      // [num_seqs + 1]: the last start[s + 1] - start[s] tokens of sequence s
  std::vector<int64_t> tokens;     // [num_queries]
  std::vector<int64_t> positions;  // [num_queries]
  std::vector<int64_t> rows;       // [num_wanted]: which attended row each wanted one is; not below num_queries: padding

  int64_t count() const { return static_cast<int64_t>(tokens.size()); }

  // Of a step in which not all rows are wanted. False if computing all queries is better or the only way: they are too
  // many, an adapter adds to their product, or its columns do not end with a panel's. Throws std::bad_alloc.
  bool find(const DecoderModel& model, const DecoderBatch& batch);

 private:
  void count_queries(const DecoderBatch& batch);
};

// Columns [begin, end) of an ungated product, of the packed weight where it lies. begin: a multiple of kPanelColumns.
Product columns_of(const Product& product, int64_t begin, int64_t end, bool bf16);

}  // namespace pagemill
