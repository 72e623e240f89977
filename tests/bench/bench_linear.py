"""The packed linear layer beside torch's, shape by shape, all contenders taken in turn within the same minute.

    .venv/bin/python tests/bench/bench_linear.py [--dtype bfloat16] [--threads 1 2] [--rows 1 4 16 64 512 2048]

Weights rotate over enough copies to leave the caches' inner levels, as the layers of a model do. Numbers are the best
of several rounds, in microseconds per call: CPU time with one thread (a busy machine does not spoil it), wall time
with more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from engine import ops

SHAPES = [(1536, 576), (576, 1536), (960, 576), (49152, 576)]  # (out_features, in_features)
ROTATED_BYTES = 48 << 20
Call = Callable[[int], Tensor]  # index of the weight copy -> output


def contenders(n: int, k: int, x: Tensor, copies: int) -> dict[str, Call]:
    weights = [torch.randn(n, k).to(x.dtype) for _ in range(copies)]
    packed = [ops.pack_linear(w) for w in weights]
    calls: dict[str, Call] = {
        "pagemill": lambda i: ops.linear(x, packed[i], None, n),
        "F.linear": lambda i: functional.linear(x, weights[i]),
    }
    mkldnn = torch.ops.mkldnn
    if x.dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
        prepacked = [mkldnn._reorder_linear_weight(w) for w in weights]
        calls["oneDNN prepacked"] = lambda i: mkldnn._linear_pointwise(x, prepacked[i], None, "none", [], "")
    return calls


def microseconds(call: Call, copies: int, rounds: int, limit_s: float, clock: Callable[[], float]) -> float:
    """The best round's mean; a round calls every copy once. Stops early after limit_s."""
    best, deadline = float("inf"), time.perf_counter() + limit_s
    for _ in range(rounds):
        start = clock()
        for i in range(copies):
            call(i)
        best = min(best, (clock() - start) / copies)
        if time.perf_counter() > deadline:
            break
    return best * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512, 2048])
    parser.add_argument("--limit", type=float, default=0.4, help="seconds per number")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    print(f"{ops.isa()}, {arguments.dtype}, torch {torch.__version__}; us per call, GFLOP/s of ours")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for n, k in SHAPES:
            copies = max(1, ROTATED_BYTES // (n * k * dtype.itemsize))
            for m in arguments.rows:
                if m * n > 1 << 26:
                    continue  # more output than weights: says nothing about the layer
                calls = contenders(n, k, torch.randn(m, k).to(dtype), copies)
                taken = {name: microseconds(call, copies, 20, arguments.limit, clock) for name, call in calls.items()}
                rate = 2 * m * n * k / taken["pagemill"] / 1e3
                row = "  ".join(f"{name} {us:9.1f}" for name, us in taken.items())
                print(f"threads {threads}  {k:5d} -> {n:5d}  M {m:4d}  {row}   {rate:6.0f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
