"""What the draw of a step's tokens costs, against reading the logits once, and beside a draw that sorts them.

    python -m tests.bench.bench_sampler [--rows 64] [--vocab 49152] [--threads 1 2]

Prints milliseconds per call, best (median), and the best as a multiple of the floor: the time to read every logit once
at the rate this process reads memory. "flat": logits of a normal distribution, the widest nucleus there is; "peaked":
logits as a language model makes them, a few likely ids far above the rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine import ops

Call = Callable[[], object]


def flat(rows: int, vocab: int) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))


def peaked(rows: int, vocab: int) -> Tensor:
    """A few likely ids some 12 above the rest, whose spread is 2.5."""
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(rows, vocab, generator=generator) * 2.5
    likely = torch.randint(0, vocab, (rows, 40), generator=generator)
    return logits.scatter(1, likely, 18 - 0.25 * torch.arange(40.0).expand(rows, -1))


class Step:
    """The arguments of one call for all rows."""

    def __init__(
        self, logits: Tensor, *, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ):
        rows = len(logits)
        self.logits = logits
        self.parameters = (
            torch.full((rows,), temperature or 1.0),
            torch.full((rows,), top_k, dtype=torch.int32),
            torch.full((rows,), top_p),
            torch.full((rows,), min_p),
            torch.full((rows,), temperature == 0),
            torch.arange(rows) * 7919,
            torch.arange(rows),
        )

    def draw(self, **edits: object) -> Call:
        return lambda: ops.sample(self.logits, *self.parameters, **edits)


def penalties(rows: int, vocab: int, num_tokens: int) -> ops.Penalties:
    starts = torch.arange(rows + 1) * num_tokens
    return ops.Penalties(
        values=torch.tensor([1.1, 0.5, 0.5]).repeat(rows, 1),
        token_ids=torch.randint(0, vocab, (rows * num_tokens,), dtype=torch.int32),
        token_starts=starts,
        output_starts=starts[:-1] + num_tokens // 2,
    )


def masks(rows: int, vocab: int) -> ops.Masks:
    words = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), dtype=torch.int32)
    return ops.Masks(words, torch.arange(rows))


def drawn(rows: int, vocab: int) -> ops.Drawn:
    return ops.Drawn(torch.empty(rows, vocab), torch.arange(rows))


def by_sorting(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Top-p as it is written in a few lines of torch."""
    ranked, ids = torch.sort(logits / temperature, dim=-1, descending=True)
    weights = torch.softmax(ranked, dim=-1)
    weights = weights * (weights.cumsum(-1) - weights < top_p)
    return ids.gather(1, torch.multinomial(weights, 1))


def cases(rows: int, vocab: int) -> dict[str, Call]:
    even, model = flat(rows, vocab), peaked(rows, vocab)
    ids = torch.randint(0, vocab, (rows, 1))
    return {
        "greedy": Step(model, temperature=0).draw(),
        "temperature, flat": Step(even).draw(),
        "temperature, peaked": Step(model).draw(),
        "top-k 50, peaked": Step(model, top_k=50).draw(),
        "top-p 0.9, flat": Step(even, top_p=0.9).draw(),
        "top-p 0.9, peaked": Step(model, top_p=0.9).draw(),
        "top-k 50, top-p 0.9, peaked": Step(model, top_k=50, top_p=0.9).draw(),
        "min-p 0.05, flat": Step(even, min_p=0.05).draw(),
        "min-p 0.05, peaked": Step(model, min_p=0.05).draw(),
        "greedy, penalties over 1000": Step(model, temperature=0).draw(penalties=penalties(rows, vocab, 1000)),
        "greedy, masks": Step(model, temperature=0).draw(masks=masks(rows, vocab)),
        "top-p 0.9, peaked, told": Step(model, top_p=0.9).draw(drawn=drawn(rows, vocab)),
        "logprobs of one id": lambda: ops.logprobs_of(model, ids),
        "logprobs of one id and top 20": lambda: ops.logprobs_topn(model, ids, 20),
        "torch: argmax": lambda: model.argmax(-1),
        "torch: log_softmax, gather": lambda: torch.log_softmax(model, -1).gather(1, ids),
        "torch: log_softmax, topk 20": lambda: torch.log_softmax(model, -1).topk(20),
    }


def read_rate(num_threads: int) -> float:
    """GB/s of one product that streams 256 MiB of weights past one row."""
    weight = ops.pack_linear(torch.zeros(1 << 18, 512, dtype=torch.bfloat16))
    x = torch.zeros(1, 512, dtype=torch.bfloat16)
    return weight.nbytes / min(timed({"": lambda: ops.linear(x, weight, None, 1 << 18)}, num_threads, 0.3)[""]) / 1e9


def timed(calls: dict[str, Call], num_threads: int, seconds: float) -> dict[str, list[float]]:
    """Seconds of every call, in turns; of one thread its own CPU time, which other processes do not disturb."""
    clock = time.thread_time if num_threads == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in calls}
    deadline = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < deadline or len(taken[next(iter(calls))]) < 3:
        for name, call in calls.items():
            started = clock()
            call()
            taken[name].append(clock() - started)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--no-sort", action="store_true", help="leave out the slowest contender")
    parser.add_argument("--limit", type=float, default=0.5, help="seconds per case")
    options = parser.parse_args()
    calls = {name: call for name, call in cases(options.rows, options.vocab).items() if options.only in name}
    if not options.no_sort:
        logits = flat(options.rows, options.vocab)
        calls["torch: sort, top-p 0.9, flat"] = lambda: by_sorting(logits, 0.8, 0.9)
    num_bytes = options.rows * options.vocab * 4
    print(f"{ops.isa()}, torch {torch.__version__}, {options.rows} x {options.vocab} logits, {num_bytes / 1e6:.1f} MB")
    for threads in options.threads:
        torch.set_num_threads(threads)
        rate = read_rate(threads)
        floor = num_bytes / rate / 1e6
        print(f"threads {threads}: the machine reads {rate:.1f} GB/s, the logits once in {floor:.3f} ms")
        for name, seconds in timed(calls, threads, options.limit).items():
            best, median = min(seconds) * 1e3, statistics.median(seconds) * 1e3
            print(f"threads {threads}  {name:32s} {best:8.3f} ({median:8.3f}) ms  {best / floor:6.1f} x", flush=True)


if __name__ == "__main__":
    main()
