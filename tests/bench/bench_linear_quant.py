"""The quantised linear layers beside our own bfloat16 one, shape by shape, taken in turn within the same minute.

    python -m tests.bench.bench_linear_quant [--threads 1 2] [--rows 1 4 16 64 512]

Numbers are as in bench_linear.py, but more copies of a weight rotate: int4's must leave the caches too. Behind them
what int8 and int4 (with minimums) gain over bfloat16, the rates at which their bytes are read, and int8's arithmetic.
The last two shapes are heads, whose weights are embedding tables at the same time (the second is Gemma 3 270M's).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine import ops
from engine.models.quantised import Bits, quantise
from tests.bench.bench_linear import SHAPES, microseconds

ROTATED_BYTES = 192 << 20  # of bfloat16; of int4 a third as much
Product = Callable[[Tensor, int], Tensor]  # x, index of the weight copy


def contenders(n: int, k: int, copies: int) -> tuple[dict[str, Product], dict[str, int]]:
    """(products, bytes of one weight)"""
    weight = torch.randn(n, k, dtype=torch.bfloat16)
    plain = [ops.pack_linear(weight) for _ in range(copies)]
    calls: dict[str, Product] = {"bf16": lambda x, i: ops.linear(x, plain[i], None, n)}
    sizes = {"bf16": plain[0].nbytes}
    kinds: tuple[Bits, ...] = (8, 4)
    for bits in kinds:
        quantised = quantise(weight, bits)
        packed = [quantised.pack() for _ in range(copies)]
        calls[f"int{bits}"] = lambda x, i, packed=packed: ops.linear_quant(x, packed[i], None, n)  # type: ignore[misc]
        sizes[f"int{bits}"] = packed[0].nbytes
    return calls, sizes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--only", default="", help="shapes whose name (576 -> 1536) holds this")
    parser.add_argument("--limit", type=float, default=0.4, help="seconds per number")
    arguments = parser.parse_args()
    print(f"{ops.isa()}, torch {torch.__version__}; us per call")
    for n, k in [*SHAPES, (262144, 640)]:
        if arguments.only not in f"{k} -> {n}":
            continue
        copies = max(1, ROTATED_BYTES // (n * k * 2))
        calls, sizes = contenders(n, k, copies)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            clock = time.thread_time if threads == 1 else time.perf_counter
            for m in arguments.rows:
                if m * n > 1 << 26:
                    continue  # more output than weights: says nothing about the layer
                x, taken = torch.randn(m, k).bfloat16(), {}
                for name, product in calls.items():
                    taken[name] = microseconds(lambda i: product(x, i), copies, 20, arguments.limit, clock)  # noqa: B023
                row = "  ".join(f"{name} {us:9.1f}" for name, us in taken.items())
                gains = "  ".join(f"{taken['bf16'] / taken[name]:4.2f}x" for name in ("int8", "int4"))
                rates = " ".join(f"{sizes[name] / us / 1e3:5.1f}" for name, us in taken.items())
                speed = 2 * m * n * k / taken["int8"] / 1e3
                name = f"threads {threads}  {k:5d} -> {n:6d}  M {m:4d}"
                print(f"{name}  {row}   {gains}   {rates} GB/s  {speed:4.0f} GFLOP/s", flush=True)


if __name__ == "__main__":
    main()
