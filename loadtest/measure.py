"""One measurement: workload x server -> result. Warm-up, sampling and the run itself; everything else calls this."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from loadtest.client import Target
from loadtest.load import LoadResult, LoadState, run_load
from loadtest.machine import CpuMark, cpu_seconds, load_average, resident_bytes
from loadtest.progress import load_progress, progress_line
from loadtest.record import RequestRecord
from loadtest.scrape import Sampler, scrape, server_report
from loadtest.summary import Objective, summarise
from loadtest.transport import Transport
from loadtest.workloads import Session

WARMUP_OUTPUT = 8  # tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. concurrency None: open loop. description: goes into the result as it is."""

    sessions: Sequence[Session]
    concurrency: int | None
    description: dict[str, Any]
    warmup: Sequence[Session] = ()
    objective: Objective | None = None


async def measure(
    transport: Transport,
    target: Target,
    plan: Plan,
    *,
    pid: int | None = None,
    sample_interval_s: float = 1.0,
    progress: bool = False,
    keep_records: bool = False,
) -> dict[str, Any]:
    """The result as JSON data. pid: the server's process, for its memory and CPU time."""
    if plan.warmup:
        await warm_up(transport, target, plan.warmup)
    before = await scrape(transport)
    load_before, mark = load_average(), CpuMark.now()
    rss_before, cpu_before = (resident_bytes(pid), cpu_seconds(pid)) if pid is not None else (0, 0.0)
    sampler = Sampler(transport, sample_interval_s, pid)
    state = LoadState()
    helpers = [asyncio.create_task(sampler.run())] if before is not None or pid is not None else []
    try:
        async with AsyncExitStack() as stack:
            if progress:
                text = load_progress(plan.description.get("workload", "load"), state)
                await stack.enter_async_context(progress_line(text))
            result = await run_load(transport, target, plan.sessions, concurrency=plan.concurrency, state=state)
    finally:
        for helper in helpers:
            helper.cancel()
            with suppress(asyncio.CancelledError):
                await helper
    cores = CpuMark.now().cores_since(mark)
    if helpers:
        await sampler.sample()
    summary = {"kind": "run"} | plan.description | summarise(result.records, plan.objective)
    summary["moments"] = [
        (record.scheduled_s - result.started_s, record.e2e_s) for record in result.records if not record.error
    ]
    summary["client"] = client_report(result)
    summary["server"] = server_report(before, await scrape(transport), sampler.samples)
    summary["machine"] = {"load_before": load_before, "cores_busy": cores, "cores_client": result.cost.share_of_core}
    if pid is not None:
        wall = perf_counter() - mark.moment_s
        summary["server"] |= {"rss_before_bytes": rss_before, "rss_after_bytes": resident_bytes(pid)}
        summary["server"]["rss_max_bytes"] = max(int(sample["rss_bytes"]) for sample in sampler.samples)
        used = (cpu_seconds(pid) - cpu_before) / wall
        summary["machine"] |= {
            "cores_server": used,
            "cores_others": max(0.0, cores - used - result.cost.share_of_core),
        }
    start = result.started_s
    summary["series"] = [{**sample, "t": sample["t"] - start} for sample in sampler.samples]
    if keep_records:
        summary["records"] = [record_row(record, start) for record in result.records]
    return summary


async def warm_up(transport: Transport, target: Target, sessions: Sequence[Session]) -> None:
    """Runs them all at once, with short outputs; their results are dropped."""
    short = [
        Session(tuple(replace(turn, max_tokens=min(turn.max_tokens, WARMUP_OUTPUT)) for turn in session.turns))
        for session in sessions
    ]
    await run_load(transport, target, short, concurrency=len(short))


def client_report(result: LoadResult) -> dict[str, Any]:
    """What the client itself cost. saturated: it may have measured itself rather than the server."""
    tokens = sum(record.output_tokens for record in result.records)
    events = sum(record.num_token_events for record in result.records)
    cost = result.cost
    return {
        "cpu_s": cost.cpu_s,
        "share_of_core": cost.share_of_core,
        "cpu_us_per_token": cost.cpu_s / tokens * 1e6 if tokens else None,
        "cpu_us_per_event": cost.cpu_s / events * 1e6 if events else None,
        "decode_afterwards_s": cost.decode_s,
        "saturated": cost.share_of_core > 0.7,
    }


def record_row(record: RequestRecord, start: float) -> dict[str, Any]:
    """One request for the result file; times relative to the start of the run."""
    return {
        "index": record.index,
        "session": record.session,
        "turn": record.turn,
        "scheduled_s": record.scheduled_s - start,
        "sent_s": record.sent_s - start,
        "ttft_s": record.ttft_s,
        "tpot_s": record.tpot_s,
        "e2e_s": record.e2e_s,
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.output_tokens,
        "error": record.error,
        "itl_s": [round(gap, 6) for gap in record.itl_s],
    }
