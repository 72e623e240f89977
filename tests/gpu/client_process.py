"""One process of tests/gpu/client.py: the project's load client without torch, so that it is there within a second.

    python -m tests.gpu.client_process

Per run it is told a job and says "ready" once its prompts are made; it is told when to start and says its Report. All
of it JSON, a line each. It ends with whoever tells it: when stdin does, even in the midst of a run.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any

import uvloop

from loadtest.client import Target
from loadtest.lengths import Lengths
from loadtest.load import LoadResult, run_load
from loadtest.prompts import TokenIds
from loadtest.transport import RawTransport
from loadtest.workloads import Session, Workload

MODEL = "model"
READY = "ready"
LENGTHS = ("prompt_len", "output_len", "turns")  # fields of a Workload


@dataclass(frozen=True, slots=True)
class Job:
    url: str
    workload: Workload
    source: TokenIds
    seed: int

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, line: str) -> Job:
        row = json.loads(line)
        workload: dict[str, Any] = row["workload"]
        workload |= {name: Lengths(**workload[name]) for name in LENGTHS}
        return cls(row["url"], Workload(**workload), TokenIds(**row["source"]), row["seed"])


@dataclass(frozen=True, slots=True)
class Report:
    """One process's part of a run. Times are time.perf_counter's, which all processes of a machine share."""

    started_s: float
    finished_s: float
    output_tokens: int
    failed: int
    error: str  # the first
    gaps_s: Sequence[float]  # between tokens of one stream
    first_s: Sequence[float]  # to each first token
    share_of_core: float

    @classmethod
    def of(cls, result: LoadResult) -> Report:
        records = result.records
        good = [record for record in records if not record.error]
        return cls(
            started_s=result.started_s,
            finished_s=max(record.finished_s for record in records),
            output_tokens=sum(record.output_tokens for record in good),
            failed=len(records) - len(good),
            error=next((f"{record.error} {record.detail}".strip() for record in records if record.error), ""),
            gaps_s=[gap for record in good for gap in record.itl_s],
            first_s=[first for record in good if (first := record.ttft_s) is not None],
            share_of_core=result.cost.share_of_core,
        )


async def send(job: Job, sessions: Sequence[Session], start_at: float) -> Report:
    transport = RawTransport(job.url)
    await asyncio.sleep(max(0.0, start_at - time.perf_counter()))
    result = await run_load(transport, Target(MODEL), sessions, concurrency=job.workload.concurrency)
    await transport.close()
    return Report.of(result)


def serve(told: Callable[[], str], say: Callable[[object], None]) -> None:
    """Jobs one after another, for ever."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        while True:
            job = Job.read(told())
            sessions = job.workload.build(job.seed, job.source)
            say(READY)
            report = runner.run(send(job, sessions, json.loads(told())))
            say(asdict(report))


def main() -> None:
    lines: SimpleQueue[str] = SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(0)  # nobody is there any more, whatever runs here

    Thread(target=listen, daemon=True).start()
    serve(lines.get, lambda answer: print(json.dumps(answer), flush=True))


if __name__ == "__main__":
    main()
