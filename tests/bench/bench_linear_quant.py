"""The quantised linear layers beside our own bfloat16 one, shape by shape, taken in turn within the same minute.

    .venv/bin/python -m tests.bench.bench_linear_quant [--threads 1 2] [--rows 1 4 16 64 512]

Numbers are as in bench_linear.py; behind them what int8 and int4 (with minimums) gain over bfloat16, and the rate at
which int8's bytes are read.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from engine import ops
from engine.models.quantised import Bits, quantise
from tests.bench.bench_linear import ROTATED_BYTES, SHAPES, Call, microseconds


def contenders(n: int, k: int, x: Tensor, copies: int) -> dict[str, Call]:
    weights = [torch.randn(n, k).bfloat16() for _ in range(copies)]
    plain = [ops.pack_linear(weight) for weight in weights]
    calls: dict[str, Call] = {"bf16": lambda i: ops.linear(x, plain[i], None, n)}
    kinds: tuple[Bits, ...] = (8, 4)
    for bits in kinds:
        packed = [quantise(weight, bits).pack() for weight in weights]
        calls[f"int{bits}"] = lambda i, packed=packed: ops.linear_quant(x, packed[i], None, n)  # type: ignore[misc]
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 512])
    parser.add_argument("--limit", type=float, default=0.4, help="seconds per number")
    arguments = parser.parse_args()
    print(f"{ops.isa()}, torch {torch.__version__}; us per call")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for n, k in SHAPES:
            copies = max(1, ROTATED_BYTES // (n * k * 2))
            for m in arguments.rows:
                if m * n > 1 << 26:
                    continue  # more output than weights: says nothing about the layer
                calls = contenders(n, k, torch.randn(m, k).bfloat16(), copies)
                taken = {name: microseconds(call, copies, 20, arguments.limit, clock) for name, call in calls.items()}
                row = "  ".join(f"{name} {us:9.1f}" for name, us in taken.items())
                gains = "  ".join(f"{taken['bf16'] / taken[name]:4.2f}x" for name in ("int8", "int4"))
                rate = n * k * 1.0625 / taken["int8"] / 1e3
                print(f"threads {threads}  {k:5d} -> {n:5d}  M {m:4d}  {row}   {gains}   {rate:5.1f} GB/s", flush=True)


if __name__ == "__main__":
    main()
