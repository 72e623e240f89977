"""The project's load client in several processes at once: one alone may be the limit at tens of thousands of tokens a
second."""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import uvloop

from loadtest.client import Target
from loadtest.load import run_load
from loadtest.prompts import TokenIds
from loadtest.summary import percentile
from loadtest.transport import RawTransport
from loadtest.workloads import Workload

MODEL = "model"


@dataclass(frozen=True, slots=True)
class Report:
    """One process's part of a run. Times are time.perf_counter's, which all processes of a machine share."""

    started_s: float
    finished_s: float
    output_tokens: int
    failed: int
    error: str  # the first
    gaps_s: list[float]  # between tokens of one stream
    first_s: list[float]  # to each first token
    share_of_core: float


@dataclass(frozen=True, slots=True)
class Served:
    """A run, all processes together."""

    reports: Sequence[Report]

    @property
    def seconds(self) -> float:
        return max(each.finished_s for each in self.reports) - min(each.started_s for each in self.reports)

    @property
    def tokens_per_s(self) -> float:
        return sum(each.output_tokens for each in self.reports) / self.seconds

    @property
    def failed(self) -> int:
        return sum(each.failed for each in self.reports)

    @property
    def error(self) -> str:
        return next((each.error for each in self.reports if each.error), "")

    @property
    def client_share(self) -> float:
        """Of a core, of the busiest process."""
        return max(each.share_of_core for each in self.reports)

    def gap_ms(self, percent: float) -> float:
        gaps = sorted(gap for each in self.reports for gap in each.gaps_s)
        return percentile(gaps, percent) * 1e3 if gaps else math.nan

    def first_ms(self, percent: float) -> float:
        firsts = sorted(first for each in self.reports for first in each.first_s)
        return percentile(firsts, percent) * 1e3 if firsts else math.nan


def load(url: str, workload: Workload, processes: int, source: TokenIds, seed: int = 0) -> Served:
    """Send a workload's requests in its closed loop; requests and concurrency are divided among the processes."""
    part = replace(
        workload, num_sessions=workload.num_sessions // processes, concurrency=workload.concurrency // processes
    )
    start_at = time.perf_counter() + 1.0  # by then all have started and made their prompts
    jobs = [(url, part, source, seed * 1000 + number, start_at) for number in range(processes)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:  # a fresh interpreter would import torch first
        return Served(pool.starmap(_one, jobs))


def _one(url: str, workload: Workload, source: TokenIds, seed: int, start_at: float) -> Report:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send(url, workload, source, seed, start_at))


async def _send(url: str, workload: Workload, source: TokenIds, seed: int, start_at: float) -> Report:
    sessions = workload.build(seed, source)
    transport = RawTransport(url)
    await asyncio.sleep(max(0.0, start_at - time.perf_counter()))
    result = await run_load(transport, Target(MODEL), sessions, concurrency=workload.concurrency)
    await transport.close()
    records = result.records
    good = [record for record in records if not record.error]
    return Report(
        started_s=result.started_s,
        finished_s=max(record.finished_s for record in records),
        output_tokens=sum(record.output_tokens for record in good),
        failed=len(records) - len(good),
        error=next((f"{record.error} {record.detail}".strip() for record in records if record.error), ""),
        gaps_s=[gap for record in good for gap in record.itl_s],
        first_s=[first for record in good if (first := record.ttft_s) is not None],
        share_of_core=result.cost.share_of_core,
    )
