"""Runs sessions against one server: closed loop (workers take the next session when they are free) or open loop
(every session starts at its time, however slow the server is; latencies count from that time)."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, process_time

from loadtest.client import Message, Target, send
from loadtest.record import RequestRecord, decode
from loadtest.transport import Transport
from loadtest.workloads import Session


@dataclass(slots=True)
class LoadState:
    """What a progress display or a sampler may look at while a run goes on."""

    planned: int = 0
    started: int = 0
    finished: int = 0
    failed: int = 0
    started_s: float = field(default_factory=perf_counter)
    running: dict[int, RequestRecord] = field(default_factory=dict)
    finished_events: int = 0

    @property
    def events(self) -> int:
        """Stream events so far: about the number of tokens."""
        return self.finished_events + sum(len(record.events) for record in self.running.values())


@dataclass(frozen=True, slots=True)
class ClientCost:
    """The client's own work. cpu_s: while requests ran; decode_s: reading JSON afterwards (None: while they ran)."""

    cpu_s: float
    wall_s: float
    decode_s: float

    @property
    def share_of_core(self) -> float:
        return self.cpu_s / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class LoadResult:
    records: list[RequestRecord]
    cost: ClientCost
    started_s: float  # perf_counter


async def run_load(
    transport: Transport,
    target: Target,
    sessions: Sequence[Session],
    *,
    concurrency: int | None,
    state: LoadState | None = None,
) -> LoadResult:
    """Sends every session. concurrency: workers of the closed loop; None: open loop, sessions need arrival times."""
    state = state or LoadState()
    state.planned = sum(len(session.turns) for session in sessions)
    records: list[RequestRecord] = []
    numbered = iter(list(enumerate(sessions)))
    with _quiet_collector():
        cpu, state.started_s = process_time(), perf_counter()
        if concurrency is None:
            await _open_loop(transport, target, numbered, state, records)
        else:
            workers = (_worker(transport, target, numbered, state, records) for _ in range(concurrency))
            await asyncio.gather(*workers)
        cpu, wall = process_time() - cpu, perf_counter() - state.started_s
    cpu_decode = process_time()
    for record in records:
        decode(record)
    records.sort(key=lambda record: record.index)
    return LoadResult(records, ClientCost(cpu, wall, process_time() - cpu_decode), state.started_s)


async def _worker(
    transport: Transport,
    target: Target,
    sessions: Iterator[tuple[int, Session]],
    state: LoadState,
    records: list[RequestRecord],
) -> None:
    for number, session in sessions:
        await run_session(transport, target, number, session, state, records.append)


async def _open_loop(
    transport: Transport,
    target: Target,
    sessions: Iterable[tuple[int, Session]],
    state: LoadState,
    records: list[RequestRecord],
) -> None:
    async with asyncio.TaskGroup() as tasks:
        for number, session in sessions:
            due = state.started_s + (session.arrival_s or 0.0)
            await asyncio.sleep(max(0.0, due - perf_counter()))
            tasks.create_task(run_session(transport, target, number, session, state, records.append, due_s=due))


async def run_session(
    transport: Transport,
    target: Target,
    number: int,
    session: Session,
    state: LoadState,
    keep: Callable[[RequestRecord], None],
    *,
    due_s: float | None = None,
) -> None:
    """The turns one after another, each with the server's real earlier answers as its history."""
    history: tuple[Message, ...] = ()
    for turn, request in enumerate(session.turns):
        if request.think_s:
            await asyncio.sleep(request.think_s)
        record = RequestRecord(request.index, number, turn, request.max_tokens, request.n, target.stream)
        body = target.body(request, history)
        record.scheduled_s = due_s if due_s is not None and turn == 0 else perf_counter()
        state.running[request.index] = record
        state.started += 1
        await send(transport, target, body, record)
        del state.running[request.index]
        state.finished += 1
        state.failed += bool(record.error) or record.status != 200
        state.finished_events += len(record.events)
        keep(record)
        if turn + 1 < len(session.turns):
            decode(record)
            if record.error:
                return
            user = {"role": "user", "content": str(request.prompt)}
            history = (*history, user, {"role": "assistant", "content": record.texts.get(0, "")})


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """No garbage collection while the clock runs: a pause of ours would read as one of the server's."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
