"""Rates and percentiles of the last minute, from the counters and histograms of /metrics. Knows no clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

from server.histograms import Histogram
from server.metrics import Metrics

WINDOW_S = 60.0
RATE_S = 3.0  # short enough to show a burst, long enough to be read
SHOWN = ("time_to_first_token_seconds", "inter_token_latency_seconds")
QUANTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one time, all since the start. buckets: counts of each of SHOWN."""

    time_s: float
    prompt_tokens: int
    decode_tokens: int
    steps: int
    step_s: float
    batch_seqs: float
    prefix_queries: int
    prefix_hits: int
    buckets: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(metrics: Metrics, now: float) -> Sample:
        shown, cache = metrics.histograms, metrics.step.cache
        return Sample(
            time_s=now,
            prompt_tokens=metrics.step_prompt_tokens,
            decode_tokens=metrics.step_decode_tokens,
            steps=metrics.steps,
            step_s=shown["step_seconds"].sum,
            batch_seqs=shown["batch_sequences"].sum,
            prefix_queries=cache.prefix_queries_total,
            prefix_hits=cache.prefix_hits_total,
            buckets=tuple(tuple(shown[name].counts) for name in SHOWN),
        )


class Window:
    """The samples of the last WINDOW_S seconds, oldest first, and one from before them."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """sample: later than all before."""
        samples = self._samples
        samples.append(sample)
        while len(samples) > 1 and samples[1].time_s <= sample.time_s - WINDOW_S:
            samples.popleft()

    def clear(self) -> None:
        self._samples.clear()

    def rates(self) -> dict[str, float | None]:
        """Tokens and steps per second, sequences and seconds per step; None where there is nothing to divide by."""
        last = self._samples[-1]
        first = next((s for s in self._samples if s.time_s >= last.time_s - RATE_S), last)
        seconds, steps = last.time_s - first.time_s, last.steps - first.steps
        return {
            "prompt_tokens": _ratio(last.prompt_tokens - first.prompt_tokens, seconds),
            "decode_tokens": _ratio(last.decode_tokens - first.decode_tokens, seconds),
            "steps": _ratio(steps, seconds),
            "step_s": _ratio(last.step_s - first.step_s, steps),
            "batch": _ratio(last.batch_seqs - first.batch_seqs, steps),
        }

    def hit_rate(self) -> float | None:
        """Prompt tokens found over those looked up; since the start where the window has seen none."""
        first, last = self._samples[0], self._samples[-1]
        lately = _ratio(last.prefix_hits - first.prefix_hits, last.prefix_queries - first.prefix_queries)
        return _ratio(last.prefix_hits, last.prefix_queries) if lately is None else lately

    def percentiles(self, histograms: dict[str, Histogram]) -> list[list[float | None]]:
        """Of each of SHOWN its QUANTILES, in seconds; since the start where the window has seen none."""
        first, last = self._samples[0], self._samples[-1]
        told = []
        for name, before, after in zip(SHOWN, first.buckets, last.buckets, strict=True):
            lately = list(map(sub, after, before))
            counts = lately if any(lately) else after
            told.append([quantile(histograms[name].buckets, counts, q) for q in QUANTILES])
        return told


def quantile(bounds: Sequence[float], counts: Sequence[int], q: float) -> float | None:
    """As Prometheus' histogram_quantile: linear within a bucket; above the last bound, that bound. None of nothing.

    counts: one per bound, and one for what is above the last."""
    below = list(accumulate(counts))
    if not below[-1]:
        return None
    rank = q * below[-1]
    index = next(i for i, count in enumerate(below) if count >= rank and count)
    if index == len(bounds):
        return bounds[-1]
    lower = bounds[index - 1] if index else 0.0
    return lower + (bounds[index] - lower) * (rank - below[index] + counts[index]) / counts[index]


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
