"""A step of the decoder in one native call beside the same decoder op by op, interleaved, on SmolLM2-135M's shape.

    python -m tests.bench.bench_decoder [--threads 1 2] [--batches 1 4 16 64] [--prompt 512] [--layers 30] [--limit 3]

Weights are random; times do not depend on them. Milliseconds per step, the best of each contender's rounds and the
median: CPU time of the calling thread with one thread (a busy machine does not spoil it), wall time with more. The
last column is the rate at which the best step reads each weight once, GB/s; before it stands what the machine reads
when it does nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from engine import ops
from engine.attention.base import AttentionMetadata
from engine.kv.cache import KVCache
from engine.models.backbone import Backbone
from engine.models.fused_recipe import FusedRecipe, LayerRecipe
from tests.engine.recipes import RECIPES, backbones, draw_tensors, rope

BLOCK_SIZE = 16
SHAPE = replace(
    RECIPES["plain"],
    vocab_size=49152,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=64,
    is_tied=True,
    ropes=(rope(64, 1e5),),
    layers=(LayerRecipe(None, 0),) * 30,
)


def with_layers(count: int) -> FusedRecipe:
    return replace(SHAPE, layers=SHAPE.layers[:1] * count)


def metadata_of(lengths: list[int], queries: list[int]) -> AttentionMetadata:
    """Sequences side by side in a fresh pool."""
    width = -(-max(lengths) // BLOCK_SIZE)
    tables = torch.arange(len(lengths) * width, dtype=torch.int32).view(len(lengths), width)
    slots = [
        int(tables[s, p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE
        for s, (length, count) in enumerate(zip(lengths, queries, strict=True))
        for p in range(length - count, length)
    ]
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(queries).cumsum(0)])
    return AttentionMetadata(
        block_tables=tables,
        query_start_loc=starts.to(torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max(queries),
        max_seq_len=max(lengths),
    )


def step_of(backbone: Backbone, lengths: list[int], queries: list[int]) -> Callable[[], object]:
    metadata = metadata_of(lengths, queries)
    total = sum(queries)
    ids = torch.arange(total) * 7919 % SHAPE.vocab_size
    positions = torch.cat([torch.arange(n - q, n) for n, q in zip(lengths, queries, strict=True)])
    last = metadata.query_start_loc[1:].to(torch.int64) - 1
    return lambda: backbone.forward(ids, positions, metadata, last)


def read_rate(num_threads: int) -> float:
    """GB/s of one product that streams 256 MiB of weights past one row."""
    weight = ops.pack_linear(torch.zeros(1 << 18, 512, dtype=torch.bfloat16))
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    taken = []
    for _ in range(8):
        start = clock()
        ops.linear(x, weight, None, 1 << 18)
        taken.append(clock() - start)
    return weight.nbytes / min(taken) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--layers", type=int, default=len(SHAPE.layers))
    parser.add_argument("--only", choices=["native", "stepwise"])
    parser.add_argument("--limit", type=float, default=3.0, help="seconds per line")
    arguments = parser.parse_args()
    shape = with_layers(arguments.layers)
    tensors = draw_tensors(shape, torch.bfloat16, hidden=576, intermediate=1536)
    num_bytes = sum(t.nbytes for name, t in tensors.items())
    models = dict(zip(("native", "stepwise"), backbones(shape, tensors), strict=True))
    models = {name: model for name, model in models.items() if arguments.only in (None, name)}
    for model in models.values():
        KVCache(model.layers, 64 * -(-arguments.context // BLOCK_SIZE) + 64, BLOCK_SIZE, torch.bfloat16)
    cases = [([arguments.context] * n, [1] * n) for n in arguments.batches]
    cases += [([arguments.prompt], [arguments.prompt])] if arguments.prompt else []
    print(f"{ops.isa()}, torch {torch.__version__}, {num_bytes / 1e6:.0f} MB of weights; ms per step, best (median)")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        print(f"threads {threads}: the machine reads {read_rate(threads):.1f} GB/s")
        for lengths, queries in cases:
            steps = {name: step_of(model, lengths, queries) for name, model in models.items()}
            taken: dict[str, list[float]] = {name: [] for name in steps}
            deadline = time.perf_counter() + arguments.limit
            while time.perf_counter() < deadline or len(taken[next(iter(steps))]) < 3:
                for name, step in steps.items():
                    start = clock()
                    step()
                    taken[name].append((clock() - start) * 1e3)
            row = "  ".join(f"{n} {min(t):8.2f} ({statistics.median(t):8.2f})" for n, t in taken.items())
            best = min(next(iter(taken.values())))
            print(f"threads {threads}  rows {sum(queries):4d}  {row}  {num_bytes / best / 1e6:6.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
