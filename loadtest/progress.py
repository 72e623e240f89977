"""A line that says how far a run is: rewritten in place on a terminal, one line every ten seconds elsewhere."""

from __future__ import annotations

import asyncio
import sys
from time import perf_counter

from loadtest.load import LoadState


async def show_progress(label: str, state: LoadState, interval_s: float = 0.5) -> None:
    """Runs until it is cancelled. Writes to stderr, so that stdout holds results only."""
    terminal = sys.stderr.isatty()
    events, moment = 0, perf_counter()
    if not terminal:
        interval_s = 10.0
    try:
        while True:
            await asyncio.sleep(interval_s)
            now, total = perf_counter(), state.events
            _write(line(label, state, (total - events) / (now - moment)), terminal)
            events, moment = total, now
    finally:
        if terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def line(label: str, state: LoadState, events_per_s: float) -> str:
    share = state.finished / state.planned if state.planned else 0.0
    bar = "#" * round(20 * share)
    failed = f", {state.failed} failed" if state.failed else ""
    elapsed = perf_counter() - state.started_s
    return (
        f"{label} [{bar:<20}] {state.finished}/{state.planned}, {len(state.running)} running{failed}, "
        f"{events_per_s:.0f} events/s, {elapsed:.0f} s"
    )


def _write(text: str, terminal: bool) -> None:
    sys.stderr.write(f"\r\x1b[K{text}" if terminal else f"{text}\n")
    sys.stderr.flush()
