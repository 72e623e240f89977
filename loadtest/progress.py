"""A line that says how far a run is: rewritten in place on a terminal, one line every ten seconds elsewhere."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from time import perf_counter

from loadtest.load import LoadState

TERMINAL_INTERVAL_S, PLAIN_INTERVAL_S = 0.5, 10.0


@asynccontextmanager
async def progress_line(text: Callable[[], str]) -> AsyncIterator[None]:
    """Shows what `text` says now, again and again while the block runs. On stderr: stdout is for results."""
    task = asyncio.create_task(_show(text))
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def load_progress(label: str, state: LoadState) -> Callable[[], str]:
    """The text of a run: requests finished and running, and the events per second since it was last asked."""
    events, moment = 0, perf_counter()

    def text() -> str:
        nonlocal events, moment
        earlier_events, earlier = events, moment
        events, moment = state.events, perf_counter()
        return line(label, state, (events - earlier_events) / max(moment - earlier, 1e-9))

    return text


def line(label: str, state: LoadState, events_per_s: float) -> str:
    failed = f", {state.failed} failed" if state.failed else ""
    elapsed = perf_counter() - state.started_s
    return (
        f"{label} {bar(state.finished, state.planned)} {state.finished}/{state.planned}, {len(state.running)} running"
        f"{failed}, {events_per_s:.0f} events/s, {elapsed:.0f} s"
    )


def bar(done: float, of: float) -> str:
    share = min(1.0, done / of) if of else 0.0
    return f"[{'#' * round(20 * share):<20}]"


async def _show(text: Callable[[], str]) -> None:
    terminal = sys.stderr.isatty()
    try:
        while True:
            await asyncio.sleep(TERMINAL_INTERVAL_S if terminal else PLAIN_INTERVAL_S)
            sys.stderr.write(f"\r\x1b[K{text()}" if terminal else f"{text()}\n")
            sys.stderr.flush()
    finally:
        if terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
