"""Where a part of tests/gpu runs: on a GPU with the sizes that are worth measuring, or dry, on the CPU with tiny ones.
And how long something takes there."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from tests.gpu.results import Results

HERE = Path(__file__).resolve().parent
COPY_RATE = "copy rate"
MATMUL_RATE = "torch matmul"
ASSUMED_COPY_RATE = 4300.0  # GB/s, read and written: an H200's, where this run could not measure it
ASSUMED_MATMUL_RATE = 780.0  # TFLOP/s, bfloat16: likewise
Size = TypeVar("Size")


@dataclass(frozen=True, slots=True)
class Place:
    """device: "cuda", or "cpu" in a dry run."""

    device: str
    results: Results

    @property
    def is_dry(self) -> bool:
        return self.device == "cpu"

    def sized(self, real: Size, tiny: Size) -> Size:
        return tiny if self.is_dry else real

    @property
    def model(self) -> Path:
        """A folder with a config.json and no weights."""
        return HERE / self.sized("llama-3-8b", "tiny-llama")

    def copy_rate(self) -> float:
        """Bytes per second, read and written."""
        return self.results.value(COPY_RATE, ASSUMED_COPY_RATE) * 1e9

    def matmul_rate(self) -> float:
        """Operations per second, bfloat16."""
        return self.results.value(MATMUL_RATE, ASSUMED_MATMUL_RATE) * 1e12

    def synchronize(self) -> None:
        if not self.is_dry:
            torch.cuda.synchronize()


def open_place(stage: str, description: str | None, arguments: Sequence[str] | None = None) -> Place:
    """From --out and --dry. Seeds torch, so that every run measures the same data."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/gpu-results"))
    parser.add_argument("--dry", action="store_true", help="tiny sizes, on the CPU")
    flags = parser.parse_args(arguments)
    torch.manual_seed(0)
    return Place("cpu" if flags.dry else "cuda", Results(flags.out, stage))


def measure(place: Place, calls: Sequence[Callable[[], object]], seconds: float = 0.2) -> tuple[float, str]:
    """(seconds of one call, how it was measured), the median over 5 times `seconds` / 5 of calls one after another.

    On a GPU the calls, at least 8 launches of them, are captured in a CUDA graph, so that the host's share is not in
    the time; where they cannot be captured they are launched one by one ("no graph"). `calls` should touch different
    memory, together more than the L2 cache holds."""
    for call in calls:
        call()
    place.synchronize()
    if place.is_dry:
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls), "dry"
    calls = list(calls) * -(-8 // len(calls))
    replay, how = _captured(calls)
    took = _device_seconds(replay, 1)
    rounds = max(1, round(seconds / 5 / max(took, 1e-6)))
    return statistics.median(_device_seconds(replay, rounds) / rounds for _ in range(5)) / len(calls), how


def _captured(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], str]:
    def one_by_one() -> None:
        for call in calls:
            call()

    graph = torch.cuda.CUDAGraph()
    try:  # the outer stream: torch's graph leaves its own current when a recording fails
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            one_by_one()
    except RuntimeError as error:
        torch.cuda.synchronize()
        return one_by_one, f"no graph: {str(error).splitlines()[0][:60]}"
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay, ""


def _device_seconds(run: Callable[[], object], times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
