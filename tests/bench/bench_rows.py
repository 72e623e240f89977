"""The ops that go row by row (norms, activation, cache write, sampling) beside their floors.

    python -m tests.bench.bench_rows [--threads 1 2] [--rows 64 512]

Sizes are SmolLM2-135M's, in bfloat16, logits in float32. Inputs rotate over enough copies to leave the caches, which
is harder than what a step does: there they come from the op before. Microseconds per call, the best of several rounds:
CPU time with one thread, wall time with more; a call of an op costs one to two by itself. The floors (yardsticks.py,
measured just before): B what must be read and written, each once, at the rate of a streaming read, F additions and
multiplications, an exponential being one; last how many times the higher one ours takes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import ops
from tests.bench.bench_linear import ROTATED_BYTES, microseconds
from tests.bench.yardsticks import Yardsticks

HIDDEN, INNER, KV_HEADS, HEAD_DIM, VOCABULARY, BLOCK_SIZE = 576, 1536, 3, 64, 49152, 16
MOST_LOGITS = 64  # rows


@dataclass(frozen=True)
class Case:
    call: Callable[[int], object]  # on which copy of the inputs
    copies: int
    num_bytes: int  # read and written
    operations: int


def copies_of(tensor: Tensor) -> list[Tensor]:
    return [tensor.clone() for _ in range(max(2, ROTATED_BYTES // tensor.nbytes))]


def norm_cases(rows: int) -> dict[str, Case]:
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)
    xs = copies_of(torch.randn(rows, HIDDEN).bfloat16())
    half = len(xs) // 2
    size = xs[0].nbytes
    count = xs[0].numel()
    return {
        "rms_norm": Case(lambda i: ops.rms_norm(xs[i], weight, 1e-5, "llama"), len(xs), 2 * size, 4 * count),
        "fused_add_rms_norm": Case(
            lambda i: ops.fused_add_rms_norm(xs[i], xs[half + i], weight, 1e-5, "llama"), half, 4 * size, 5 * count
        ),
    }


def activation_cases(rows: int) -> dict[str, Case]:
    xs = copies_of(torch.randn(rows, 2 * INNER).bfloat16())
    size = xs[0].nbytes * 3 // 2
    return {"silu_and_mul": Case(lambda i: ops.silu_and_mul(xs[i]), len(xs), size, 4 * rows * INNER)}


def cache_cases(rows: int) -> dict[str, Case]:
    keys = copies_of(torch.randn(rows, KV_HEADS, HEAD_DIM).bfloat16())
    caches = copies_of(torch.zeros(-(-rows // BLOCK_SIZE), 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=torch.bfloat16))
    slots = torch.arange(rows)

    def write(i: int) -> None:
        ops.reshape_and_cache(keys[i], keys[i], caches[i][:, 0], caches[i][:, 1], slots)

    return {"reshape_and_cache": Case(write, len(caches), 3 * keys[0].nbytes, 0)}


def sampling_cases(rows: int) -> dict[str, Case]:
    rows = min(rows, MOST_LOGITS)
    logits = copies_of(torch.randn(rows, VOCABULARY))
    ids = torch.zeros(rows, 1, dtype=torch.int64)
    zeros, limits = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int32)

    def draw(top_p: float, greedy: bool) -> Callable[[int], object]:
        warm, none = torch.full((rows,), 0.8), torch.zeros(rows)
        return lambda i: ops.sample(
            logits[i], warm, limits, torch.full((rows,), top_p), none, torch.full((rows,), greedy), zeros, zeros
        )

    size, count = logits[0].nbytes, logits[0].numel()
    return {
        f"sample greedy ({rows} rows)": Case(draw(1.0, True), len(logits), size, count),
        f"sample ({rows} rows)": Case(draw(1.0, False), len(logits), size, 3 * count),
        f"sample top_p 0.9 ({rows} rows)": Case(draw(0.9, False), len(logits), size, 3 * count),
        f"logprobs_of ({rows} rows)": Case(lambda i: ops.logprobs_of(logits[i], ids), len(logits), size, 3 * count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--limit", type=float, default=0.4, help="seconds per number")
    arguments = parser.parse_args()
    print(f"{ops.isa()}, torch {torch.__version__}; us per call, best over its floor")
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        yardsticks = Yardsticks.measure(threads, ("float32",))
        print(yardsticks)
        clock = time.thread_time if threads == 1 else time.perf_counter
        for rows in arguments.rows:
            for make in (norm_cases, activation_cases, cache_cases, sampling_cases):
                for name, case in make(rows).items():
                    us = microseconds(case.call, case.copies, 20, arguments.limit, clock)
                    judged = yardsticks.floors(case.num_bytes, case.operations, "float32").judge(us)
                    print(f"threads {threads}  rows {rows:4d}  {name:28s}  {us:9.1f}   {judged}", flush=True)


if __name__ == "__main__":
    main()
