"""Arrival processes of the open loop: when each request is sent, decided before the run, whatever the server does.

Times are seconds since the start of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from loadtest.lengths import UsageError

KINDS = ("poisson", "constant", "bursty")


def arrival_times(kind: str, rate: float, count: int, seed: int, *, burstiness: float = 0.25) -> tuple[float, ...]:
    """`count` arrival times at exactly `rate` per second: the first is 0, the last (count - 1) / rate. Between them
    Poisson arrivals lie as a Poisson process does that is known to have so many: short runs would else miss the rate.

    bursty: gaps are gamma-distributed with shape `burstiness` (1 is Poisson, below 1 clusters).
    Raises UsageError on a rate or burstiness that is not positive."""
    if rate <= 0 or burstiness <= 0:
        raise UsageError(f"Rate and burstiness must be positive, got {rate:g} and {burstiness:g}.")
    times, now = [], 0.0
    for gap in _gaps(kind, rate, Random(f"arrivals-{seed}"), burstiness):
        times.append(now)
        now += gap
        if len(times) >= count:
            break
    stretch = (count - 1) / rate / times[-1] if times[-1] > 0 else 1.0
    return tuple(moment * stretch for moment in times)


def _gaps(kind: str, rate: float, random: Random, burstiness: float) -> Iterator[float]:
    shape = {"poisson": 1.0, "bursty": burstiness}.get(kind)
    if shape is None and kind != "constant":
        raise UsageError(f"Arrivals must be one of {', '.join(KINDS)}, got {kind!r}.")
    while True:
        yield 1 / rate if shape is None else random.gammavariate(shape, 1 / (rate * shape))
