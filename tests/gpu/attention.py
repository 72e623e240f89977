"""How fast paged attention is: decode against the rate of copying memory, prompts against torch's matrix products.

    python -m tests.gpu.attention decode|prefill [--out FOLDER] [--dry]

Llama-3-8B's heads: 32 query heads, 8 of keys and values, 128 wide, bfloat16, blocks of 16 tokens in random order.
Decode: one query per sequence; what counts is reading K and V once. So many batches with blocks of their own take
turns that nothing is found in the L2 cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine import device_ops, ops
from tests.gpu.place import Place, measure, open_place

QUERY_HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2  # K and V of one token and layer
COLD_BYTES = 512 << 20  # what takes turns: several times the 50 to 60 MB of L2
BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (512, 2048, 8192, 32768)
PREFILLS = ((1, 2048, 0), (4, 2048, 0), (1, 8192, 0), (1, 2048, 30720))  # sequences, new tokens, tokens before them
DECODE_AIM = 0.85  # of the copy rate


class Cache:
    """K and V of one layer, every block random numbers."""

    def __init__(self, place: Place, num_tokens: int) -> None:
        self.place, self.num_blocks = place, -(-num_tokens // BLOCK)
        half = KV_HEADS * BLOCK * DIM
        blocks = torch.empty(self.num_blocks, 2 * half, dtype=torch.bfloat16, device=place.device).normal_()
        shape = (self.num_blocks, KV_HEADS, BLOCK, DIM)
        self.keys, self.values = blocks[:, :half].view(shape), blocks[:, half:].view(shape)

    def tables(self, num_seqs: int, context: int) -> list[Tensor]:
        """Block tables [num_seqs, width], int32, of batches that share no block, together COLD_BYTES if there are as
        many blocks."""
        width = -(-context // BLOCK)
        wanted = -(-COLD_BYTES // (num_seqs * context * TOKEN_BYTES))
        count = max(1, min(wanted, self.num_blocks // (num_seqs * width), self.place.sized(256, 2)))
        order = torch.randperm(self.num_blocks, dtype=torch.int32, device=self.place.device)
        return list(order[: count * num_seqs * width].view(count, num_seqs, width))


def attention_call(
    place: Place, cache: Cache, table: Tensor, queries: int, context: int, query: Tensor, out: Tensor
) -> Callable[[], object]:
    """One call for len(table) sequences of `context` tokens, the last `queries` of each asking."""
    num_seqs = len(table)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=place.device) * queries
    lengths = torch.full((num_seqs,), context, dtype=torch.int32, device=place.device)
    arguments = (cache.keys, cache.values, table, starts, lengths)
    if place.is_dry:
        return lambda: ops.paged_attention(query, *arguments, scale=DIM**-0.5, out=out)
    longest = table.shape[1] * BLOCK
    num_bytes = device_ops.paged_attention_workspace(num_seqs, queries, longest, QUERY_HEADS, KV_HEADS, DIM)
    workspace = torch.empty(num_bytes, dtype=torch.uint8, device=place.device)
    return lambda: device_ops.paged_attention_into(
        out, query, *arguments, workspace, scale=DIM**-0.5, max_query_len=queries, max_seq_len=longest
    )


def measured(place: Place, cache: Cache, tables: Sequence[Tensor], queries: int, context: int) -> tuple[float, str]:
    shape = (len(tables[0]) * queries, QUERY_HEADS, DIM)
    query = torch.randn(shape, dtype=torch.bfloat16, device=place.device)
    out = torch.empty_like(query)
    return measure(place, [attention_call(place, cache, table, queries, context, query, out) for table in tables])


def decode(place: Place) -> None:
    batches, contexts = place.sized(BATCHES, (1, 3)), place.sized(CONTEXTS, (40,))
    cache = Cache(place, max(batches) * (max(contexts) + BLOCK))
    for context in reversed(contexts):
        for num_seqs in reversed(batches):
            seconds, how = measured(place, cache, cache.tables(num_seqs, context), 1, context)
            rate = num_seqs * context * TOKEN_BYTES / seconds
            place.results.tell(
                f"decode attention {num_seqs} x {context}", rate / 1e9, "GB/s", share=rate / place.copy_rate(),
                of="copy rate", aim=place.sized(DECODE_AIM, None), note=f"{seconds * 1e6:.1f} us{how and ', ' + how}",
            )  # fmt: skip


def prefill(place: Place) -> None:
    shapes = place.sized(PREFILLS, ((1, 20, 0), (2, 8, 24)))
    cache = Cache(place, max(seqs * (new + before) for seqs, new, before in shapes))
    for num_seqs, new, before in shapes:
        context = new + before
        seconds, how = measured(place, cache, cache.tables(num_seqs, context)[:1], new, context)
        visible = num_seqs * sum(range(before + 1, context + 1))  # pairs of a query and a key it sees
        rate = 4 * QUERY_HEADS * DIM * visible / seconds
        place.results.tell(
            f"prefill attention {num_seqs} x {new}" + (f" after {before}" if before else ""), rate / 1e12, "TFLOP/s",
            share=rate / place.matmul_rate(), of="matmul", note=f"{seconds * 1e3:.3f} ms{how and ', ' + how}",
        )  # fmt: skip


if __name__ == "__main__":
    name = sys.argv[1]
    {"decode": decode, "prefill": prefill}[name](open_place(f"{name} attention", __doc__, sys.argv[2:]))
