"""Speed of paged attention beside its floors and beside torch's SDPA.

    python -m tests.bench.bench_attention [--threads 1 2] [--isa avx512] [--only decode]

The floors (yardsticks.py, measured just before): B reading K and V once at the rate of a streaming read, F the two
products at the rate of the level's dot instruction, exponentials not counted; last how many times the higher one ours
takes.

Decode walks over as many layers' caches as 160 MB hold, so that K and V come from memory, as they do in a step of a
model. `shared`: all sequences begin with so many tokens in the same blocks; beside it the same batch with blocks of
their own. torch's figure for decode includes gathering the blocks into dense tensors, which is what a backend without
paged attention does; for the prompt chunk it does not. Best of several runs: CPU time with one
thread (a busy machine does not spoil it), wall time with more; run it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from engine import ops
from tests.bench.yardsticks import Yardsticks

DECODE = ((16, 512, 3, 3, 64), (64, 2048, 3, 3, 64), (16, 1024, 8, 4, 128), (1, 2048, 3, 3, 64))
SHARED = ((16, 1060, 1024, 3, 3, 64), (64, 1060, 1024, 3, 3, 64), (16, 1060, 1024, 1, 4, 256))
PREFILL = ((512, 2000, 3, 3, 64), (512, 2000, 8, 4, 128))
DTYPE = torch.bfloat16
CACHE_BYTES = 160_000_000  # of all layers together: more than the last-level cache


def best(run: Callable[[], object], repeats: int = 7, seconds: float = 0.3) -> float:
    """Seconds of the fastest of `repeats` batches of calls."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    run()
    start = clock()
    run()
    calls = max(1, int(seconds / repeats / max(clock() - start, 1e-7)))
    times = []
    for _ in range(repeats):
        start = clock()
        for _ in range(calls):
            run()
        times.append((clock() - start) / calls)
    return min(times)


Cache = tuple[Tensor, Tensor]


def make_caches(num_blocks: int, kv_heads: int, dim: int) -> list[Cache]:
    """Key and value cache (views of one buffer, as the engine has it) of each layer."""
    half = kv_heads * 16 * dim
    layers = max(1, CACHE_BYTES // (num_blocks * half * 4))
    first = torch.randn(num_blocks, 2 * half).to(DTYPE)
    buffers = [first, *(first.clone() for _ in range(layers - 1))]
    shape = (num_blocks, kv_heads, 16, dim)
    return [(buffer[:, :half].view(shape), buffer[:, half:].view(shape)) for buffer in buffers]


def make_table(num_seqs: int, length: int, shared: int = 0) -> Tensor:
    """Blocks in random order; the first `shared` tokens' are the same for all sequences."""
    per_seq, common = -(-length // 16), shared // 16
    order = torch.randperm(common + num_seqs * (per_seq - common), dtype=torch.int32)
    return torch.cat([order[:common].expand(num_seqs, -1), order[common:].view(num_seqs, -1)], dim=1).contiguous()


def decode_seconds(caches: list[Cache], table: Tensor, length: int, query: Tensor) -> float:
    num_seqs, dim = query.shape[0], query.shape[2]
    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    lengths = torch.full((num_seqs,), length, dtype=torch.int32)
    turns = itertools.cycle(caches)
    return best(lambda: ops.paged_attention(query, *next(turns), table, starts, lengths, scale=dim**-0.5))


def decode(yardsticks: Yardsticks, num_seqs: int, length: int, kv_heads: int, group: int, dim: int) -> str:
    table = make_table(num_seqs, length)
    caches = make_caches(table.numel(), kv_heads, dim)
    query = torch.randn(num_seqs, kv_heads * group, dim).to(DTYPE)
    ours = decode_seconds(caches, table, length, query)
    turns = itertools.cycle(caches)

    def dense() -> Tensor:
        shape = (num_seqs, -1, kv_heads, 16, dim)
        keys, values = next(turns)
        k = keys[table.long().view(-1)].view(shape).transpose(1, 2).reshape(num_seqs, kv_heads, -1, dim)
        v = values[table.long().view(-1)].view(shape).transpose(1, 2).reshape(num_seqs, kv_heads, -1, dim)
        q = query.view(num_seqs, kv_heads * group, 1, dim)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    theirs = best(dense, repeats=3)
    size = num_seqs * length * kv_heads * dim * 2 * 2
    floors = yardsticks.floors(size, size * group, "bfloat16")  # a number of 2 bytes: a multiplication, an addition
    return f"{floors.judge(ours * 1e6)}   {ours * 1e6:8.0f} us   torch {theirs * 1e6:8.0f} us"


def shared(
    yardsticks: Yardsticks, num_seqs: int, length: int, common: int, kv_heads: int, group: int, dim: int
) -> str:
    query = torch.randn(num_seqs, kv_heads * group, dim).to(DTYPE)
    own_table, table = make_table(num_seqs, length), make_table(num_seqs, length, common)
    own = decode_seconds(make_caches(own_table.numel(), kv_heads, dim), own_table, length, query)
    ours = decode_seconds(make_caches(int(table.max()) + 1, kv_heads, dim), table, length, query)
    per_token = kv_heads * dim * 2 * 2
    read = (common + num_seqs * (length - common)) * per_token
    floors = yardsticks.floors(read, num_seqs * length * per_token * group, "bfloat16")
    return f"{floors.judge(ours * 1e6)}   {ours * 1e6:8.0f} us   with blocks of their own {own * 1e6:8.0f} us"


def prefill(yardsticks: Yardsticks, num_queries: int, length: int, kv_heads: int, group: int, dim: int) -> str:
    table = make_table(1, length)
    keys, values = make_caches(table.numel(), kv_heads, dim)[0]
    query = torch.randn(num_queries, kv_heads * group, dim).to(DTYPE)
    starts = torch.tensor([0, num_queries], dtype=torch.int32)
    lengths = torch.tensor([length], dtype=torch.int32)
    ours = best(lambda: ops.paged_attention(query, keys, values, table, starts, lengths, scale=dim**-0.5))
    dense_keys = torch.randn(1, kv_heads, length, dim).to(DTYPE)
    dense_values = torch.randn(1, kv_heads, length, dim).to(DTYPE)
    dense_query = query.transpose(0, 1).unsqueeze(0)
    mask = torch.arange(length)[None, :] <= torch.arange(length - num_queries, length)[:, None]
    theirs = best(
        lambda: torch.nn.functional.scaled_dot_product_attention(
            dense_query, dense_keys, dense_values, attn_mask=mask, enable_gqa=True
        ),
        repeats=3,
    )
    flops = 4 * kv_heads * group * dim * sum(range(length - num_queries + 1, length + 1))
    floors = yardsticks.floors(length * kv_heads * dim * 2 * 2, flops, "bfloat16")
    return f"{floors.judge(ours * 1e6)}   {ours * 1e6:8.0f} us   torch {theirs * 1e6:8.0f} us"


def cases() -> Iterator[tuple[str, Callable[..., str], tuple[int, ...]]]:
    """(name, what judges it, sizes)"""
    for seqs, length, *rest in DECODE:
        yield f"decode  {seqs:3d} x {length}, {rest}", decode, (seqs, length, *rest)
    for seqs, length, common, *rest in SHARED:
        yield f"shared  {seqs:3d} x {length}, {common} shared, {rest}", shared, (seqs, length, common, *rest)
    for queries, length, *rest in PREFILL:
        yield f"prefill {queries} x {length}, {rest}", prefill, (queries, length, *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    arguments = parser.parse_args()
    ops.set_isa(arguments.isa)
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        yardsticks = Yardsticks.measure(threads, ("bfloat16",))
        print(f"level {ops.isa()}, {DTYPE}; seqs x length, kv heads, group, head dim\n{yardsticks}")
        for name, judged, sizes in cases():
            if arguments.only in name:
                print(f"  {name}: {judged(yardsticks, *sizes)}", flush=True)


if __name__ == "__main__":
    main()
