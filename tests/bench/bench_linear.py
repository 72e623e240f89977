"""The packed linear layer beside torch's and beside its floors, all contenders taken in turn within the same minute.

    python -m tests.bench.bench_linear [--dtype bfloat16] [--threads 1 2] [--rows 1 4 16 64 512 2048]

Weights rotate over enough copies to leave the caches, as the layers of a model do. Numbers are the best of several
rounds, in microseconds per call: CPU time with one thread (a busy machine does not spoil it), wall time with more. The
floors (yardsticks.py, measured just before): B reading the weight and x and writing the result once at the rate of a
streaming read, F all multiplications and additions at the rate of the level's instruction; last how many times the
higher one ours takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as functional
from torch import Tensor

from engine import ops
from tests.bench.yardsticks import Kind, Yardsticks

SHAPES = [(1536, 576), (576, 1536), (960, 576), (49152, 576)]  # (out_features, in_features)
ROTATED_BYTES = 128 << 20
Call = Callable[[int], Tensor]  # index of the weight copy -> output


class Layer:
    """Copies of one weight [n, k] as each contender wants them."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        self.n = n
        self.copies = max(1, ROTATED_BYTES // (n * k * dtype.itemsize))
        first = torch.randn(n, k).to(dtype)
        self._plain = [first.clone() for _ in range(self.copies)]
        self._packed = [ops.pack_linear(first) for _ in range(self.copies)]
        self._reordered: list[Tensor] = []
        if dtype == torch.bfloat16 and torch.backends.mkldnn.is_available():
            self._reordered = [torch.ops.mkldnn._reorder_linear_weight(first) for _ in range(self.copies)]

    def contenders(self, x: Tensor) -> dict[str, Call]:
        calls: dict[str, Call] = {
            "pagemill": lambda i: ops.linear(x, self._packed[i], None, self.n),
            "F.linear": lambda i: functional.linear(x, self._plain[i]),
        }
        if self._reordered:
            product = torch.ops.mkldnn._linear_pointwise
            calls["oneDNN prepacked"] = lambda i: product(x, self._reordered[i], None, "none", [], "")
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
    parser.add_argument("--only", default="", help="shapes whose name (576 -> 1536) holds this")
    parser.add_argument("--limit", type=float, default=0.4, help="seconds per number")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    kind: Kind = arguments.dtype
    print(f"{ops.isa()}, {arguments.dtype}, torch {torch.__version__}; us per call, best of ours over its floor")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        yardsticks = Yardsticks.measure(threads, (kind,))
        print(yardsticks)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for n, k in SHAPES:
            if arguments.only not in f"{k} -> {n}":
                continue
            layer = Layer(n, k, dtype)
            for m in arguments.rows:
                if m * n > 1 << 26:
                    continue  # more output than weights: says nothing about the layer
                calls = layer.contenders(torch.randn(m, k).to(dtype))
                taken = {
                    name: microseconds(call, layer.copies, 20, arguments.limit, clock) for name, call in calls.items()
                }
                row = "  ".join(f"{name} {us:9.1f}" for name, us in taken.items())
                floors = yardsticks.floors((n * k + m * (n + k)) * dtype.itemsize, 2 * m * n * k, kind)
                judged = floors.judge(taken["pagemill"])
                print(f"threads {threads}  {k:5d} -> {n:5d}  M {m:4d}  {row}   {judged}", flush=True)


if __name__ == "__main__":
    main()
