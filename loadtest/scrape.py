"""What the server says of itself: /metrics before, during and after a run.

A name is looked up by its ending, so that `pagemill_num_requests_running` and `vllm:num_requests_running` are one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from loadtest.machine import resident_bytes
from loadtest.transport import Transport, TransportError

SERIES = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting", "event_loop_tasks")
DELTAS = (
    "generation_tokens_total", "prompt_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total",
    "num_preemptions_total", "discarded_tokens_total", "copy_on_write_total",
)  # fmt: skip
LIVE_SLOTS = ("live_slot_steps_total", "used_slot_steps_total")


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text format -> the sum over labels of every sample name, and every labelled sample under
    name{label="value"} (histogram buckets left out)."""
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        end = line.rfind("}")
        name = line.partition("{")[0] if end >= 0 else line.partition(" ")[0]
        rest = line[end + 1 :] if end >= 0 else line[len(name) :]
        if name.endswith("_bucket"):
            continue
        value = float(rest.split()[0])
        sums[name] = sums.get(name, 0.0) + value
        if end >= 0:
            sums[line[: end + 1]] = value
    return sums


def find(metrics: Mapping[str, float], ending: str) -> float | None:
    """The value of the metric called `ending`, whatever its prefix ("x_" or "x:"), or None."""
    for name, value in metrics.items():
        if name == ending or (name.endswith(ending) and name[: -len(ending)].endswith((":", "pagemill_"))):
            return value
    return None


async def scrape(transport: Transport) -> dict[str, float] | None:
    """None if the server has no /metrics."""
    try:
        status, body = await transport.get("/metrics")
    except TransportError:
        return None
    return parse_metrics(body.decode()) if status == 200 else None


@dataclass(slots=True)
class Sampler:
    """Scrapes every `interval_s` while `run` is a running task. samples: one dict each, "t" in seconds of
    perf_counter, "rss_bytes" of the process tree of `pid` if one is given."""

    transport: Transport
    interval_s: float = 1.0
    pid: int | None = None
    samples: list[dict[str, float]] = field(default_factory=list)

    async def run(self) -> None:
        while True:
            await self.sample()
            await asyncio.sleep(self.interval_s)

    async def sample(self) -> None:
        sample = {"t": perf_counter()}
        metrics = await scrape(self.transport)
        for name in SERIES:
            value = find(metrics or {}, name)
            if value is not None:
                sample[name] = value
        if self.pid is not None:
            sample["rss_bytes"] = resident_bytes(self.pid)
        self.samples.append(sample)


def server_report(
    before: Mapping[str, float] | None, after: Mapping[str, float] | None, samples: list[dict[str, float]]
) -> dict[str, Any]:
    """Differences of counters over the run, the live-slot utilisation, peaks of the sampled gauges."""
    if before is None or after is None:
        return {"metrics": "none"}
    deltas = {
        name: end - start
        for name in DELTAS
        if (start := find(before, name)) is not None and (end := find(after, name)) is not None
    }
    report: dict[str, Any] = {"deltas": deltas, "live_slot_utilization": live_slot_utilization(before, after)}
    minimum = find(after, "live_slot_utilization_min")
    if minimum is not None:
        report["live_slot_utilization_min"] = minimum
    for name in SERIES:
        values = [sample[name] for sample in samples if name in sample]
        if values:
            report[name] = {"mean": sum(values) / len(values), "max": max(values)}
    return report


def live_slot_utilization(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Written slots of running sequences over slots of used blocks, both summed over the steps between."""
    counts = [(find(before, name), find(after, name)) for name in LIVE_SLOTS]
    (live_before, live_after), (used_before, used_after) = counts
    if live_before is None or live_after is None or used_before is None or used_after is None:
        return None
    return (live_after - live_before) / (used_after - used_before) if used_after > used_before else None
