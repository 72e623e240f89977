"""Where the time of a piece of work goes, by torch's profiler: kernels sorted into kinds by their names."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

# Kind -> pattern of kernels' own names, the first that fits counts; on the CPU the names are those of ops.
KINDS: Mapping[str, str] = {
    "attention": r"attention|merge_splits|flash|fmha",
    "linear layers": r"multiply_tile|multiply_float32|merge_products|linear|gemm|gemv|nvjet|cutlass|aten::(add)?mm$",
    "norms, rotations, activations, cache": r"norm|process_heads|write_heads|activate|rotary|rope|cache|silu|gelu",
    "sampling": r"sample|tell_rows|logprob|penal|bias|mask|count_ids|load_row|\bshape$|argmax|reduce",
    "batch, embedding": r"prepare|advance|store_ids|index|gather|embedding",
    "copies": r"memcpy|memset|copy|::stage$",
}
OTHER, IDLE = "other kernels", "no kernel (host, waiting)"
Span = tuple[str, float, float]  # name, start, end in seconds


@dataclass(frozen=True, slots=True)
class Profile:
    """seconds: kind -> time of its kernels, and IDLE: when none ran. text: the names that took longest."""

    wall: float
    seconds: dict[str, float]
    text: str


def own_name(name: str) -> str:
    """A kernel's name without its return type, template arguments and parameters, whose names would mislead."""
    bare = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", bare, maxsplit=1)[0].strip()


def kind_of(name: str) -> str:
    for kind, pattern in KINDS.items():
        if re.search(pattern, own_name(name), re.IGNORECASE):
            return kind
    return OTHER


def summarise(spans: Iterable[Span], wall: float) -> Profile:
    """Spans may overlap: IDLE is the time that none of them covers."""
    by_kind: dict[str, float] = defaultdict(float)
    by_name: dict[str, float] = defaultdict(float)
    busy, covered = 0.0, float("-inf")
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        by_kind[kind_of(name)] += end - start
        by_name[name] += end - start
        busy += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    seconds = longest_first(by_kind) | {IDLE: max(0.0, wall - busy)}
    named = list(longest_first(by_name).items())[:60]
    text = "".join(f"{took * 1e3:10.3f} ms  {kind_of(name):36s}  {name}\n" for name, took in named)
    return Profile(wall, seconds, text)


def longest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def profiled(device: str, work: Callable[[], object]) -> Profile:
    """On a GPU kernels that any thread launches count, replayed ones too; on the CPU the ops of this thread."""
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        wall = time.perf_counter() - start
    return summarise(spans_of(profiler.events(), device), wall)


def spans_of(events: Iterable[object], device: str) -> list[Span]:
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    return [
        (event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)  # type: ignore[attr-defined]
        for event in events
        if getattr(event, "device_type", None) == wanted
    ]
