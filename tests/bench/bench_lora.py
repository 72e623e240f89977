"""A decode step with LoRA adapters beside the same step without, interleaved, on SmolLM2-135M's shape.

    python -m tests.bench.bench_lora [--threads 1] [--batches 1 16 64] [--rank 16] [--layers 30] [--limit 6]

native: no adapter, one call; stepwise: no adapter, op by op; one: all rows have the same, in one call; half: every
other row has it; eight: the rows have eight in turn; one-stepwise: as one, op by op. Adapters change all seven layers.
Milliseconds per step, the best and the median of the rounds: CPU time of the calling thread with one thread, wall time
with more. Ratios are of the medians to native's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from engine import ops
from engine.kv.cache import KVCache
from engine.models.backbone import Backbone
from engine.models.deltas import AdapterSpan, LowRank, Spans, joined
from tests.bench.bench_decoder import BLOCK_SIZE, SHAPE, metadata_of, with_layers
from tests.engine.recipes import backbones, draw_tensors

NUM_ADAPTERS = 8
KINDS = ("one", "half", "eight")


def add_adapters(backbone: Backbone, rank: int) -> None:
    for adapter in range(1, NUM_ADAPTERS + 1):
        for site in backbone.model.adapter_sites():
            parts = [
                LowRank(
                    torch.randn(rank, site.in_features, dtype=backbone.dtype) / site.in_features**0.5,
                    torch.randn(rows, rank, dtype=backbone.dtype) * 0.1,
                )
                for rows in site.rows
            ]
            site.adapt(adapter, joined(site, parts))
    backbone.model.finish_adapters(NUM_ADAPTERS)


def spans_of(kind: str, batch: int) -> Spans:
    """Rows of one adapter stand side by side, as engine/forward_batch.py puts them."""
    if kind == "one":
        return (AdapterSpan(1, 0, batch),)
    if kind == "half":
        return (AdapterSpan(1, batch // 2, batch),)
    share = max(1, batch // NUM_ADAPTERS)
    return tuple(AdapterSpan(i + 1, i * share, (i + 1) * share) for i in range(min(batch, NUM_ADAPTERS)))


def step_of(backbone: Backbone, batch: int, context: int, spans: Spans) -> Callable[[], object]:
    metadata = metadata_of([context] * batch, [1] * batch)
    ids = torch.arange(batch) * 7919 % SHAPE.vocab_size
    positions, wanted = torch.full((batch,), context - 1), torch.arange(batch)
    return lambda: backbone.forward(ids, positions, metadata, wanted, spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--layers", type=int, default=len(SHAPE.layers))
    parser.add_argument("--limit", type=float, default=6.0, help="seconds per line")
    arguments = parser.parse_args()
    shape = with_layers(arguments.layers)
    tensors = draw_tensors(shape, torch.bfloat16, hidden=576, intermediate=1536)
    native, stepwise = backbones(shape, tensors)
    before = native.weight_bytes
    for model in (native, stepwise):
        add_adapters(model, arguments.rank)
    taken_bytes = (native.weight_bytes - before) / NUM_ADAPTERS
    for model in (native, stepwise):
        KVCache(model.layers, 64 * -(-arguments.context // BLOCK_SIZE) + 64, BLOCK_SIZE, torch.bfloat16)
    print(
        f"{ops.isa()}, torch {torch.__version__}; an adapter of rank {arguments.rank} takes {taken_bytes / 1e6:.1f} MB"
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for batch in arguments.batches:
            steps = {
                "native": step_of(native, batch, arguments.context, ()),
                "stepwise": step_of(stepwise, batch, arguments.context, ()),
                **{kind: step_of(native, batch, arguments.context, spans_of(kind, batch)) for kind in KINDS},
                "one-stepwise": step_of(stepwise, batch, arguments.context, spans_of("one", batch)),
            }
            taken: dict[str, list[float]] = {name: [] for name in steps}
            deadline = time.perf_counter() + arguments.limit
            while time.perf_counter() < deadline or len(taken["native"]) < 3:
                for name, step in steps.items():
                    start = clock()
                    step()
                    taken[name].append((clock() - start) * 1e3)
            middle = {name: statistics.median(t) for name, t in taken.items()}
            row = "  ".join(
                f"{n} {min(t):.2f} ({middle[n]:.2f}, {middle[n] / middle['native']:.2f}x)" for n, t in taken.items()
            )
            print(f"threads {threads}  rows {batch:3d}  {row}", flush=True)


if __name__ == "__main__":
    main()
