"""Grammars that wait to be compiled: in which order, for whom, and how many at most.

Each begins with a short slice of CPU time, which is enough for most; what needs more is tried anew with more, behind
those that are new, and then in a worker of its own, where costly grammars wait for each other only. Knows nothing of
grammars. All of it runs on the event loop, but for the work.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from engine.grammar_turns import Turns
from engine.outputs import NotServing, QueueFull
from engine.sampling_params import StructuredOutput

Made = TypeVar("Made")

# CPU seconds of the slices, and how many of two workers may be at it: one is always there for what is new
SLICES = ((0.02, 2), (0.25, 1))
NUM_WORKERS = SLICES[0][1]
MAX_QUEUED = 128  # compilations that wait or run
MAX_SLOW = 16  # of those, costly ones
CLIENT_SHARE = 2  # one client has at most this part of either


class Workers:
    """Threads whose turns clients take; started with the first. most: see Turns."""

    def __init__(self, name: str, *most: int) -> None:
        self._name = name
        self._size = most[0]
        self._turns = Turns(most)
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    async def run(self, level: int, client: str, work: Callable[[], Made]) -> Made:
        """What `work` returns. The turn ends with the work, though whoever waits may have left before.

        Raises NotServing after `close`, QueueFull where the machine has no thread left."""
        await self._turns.take(level, client)
        if self._closed:
            self._turns.give(level)
            raise NotServing("The server is shutting down.")
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._size, self._name)
        loop = asyncio.get_running_loop()

        def ended(_: Future[Made]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(self._turns.give, level)

        try:
            future = self._pool.submit(work)
        except RuntimeError as error:
            self._turns.give(level)
            raise QueueFull("No thread can be started for this grammar. Please try again later.") from error
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._closed = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True)
class Pending(Generic[Made]):
    """A compilation that waits or runs, for num_waiting requests, the first of them the client's. is_slow: it has
    taken more than all slices."""

    client: str
    future: asyncio.Future[Made] = field(init=False)
    num_waiting: int = 0
    is_slow: bool = False


class CompileQueue(Generic[Made]):
    """work: compiles within some CPU seconds, or returns None if that takes longer and may; never with the last.
    limit_s: those last seconds. arrived: called with each result, before whoever waits has it."""

    def __init__(
        self,
        work: Callable[[StructuredOutput, float], Made | None],
        limit_s: float,
        arrived: Callable[[StructuredOutput, Made], None],
    ) -> None:
        self._work = work
        self._limit_s = limit_s
        self._when_done = arrived
        self._pending: dict[StructuredOutput, Pending[Made]] = {}
        self._quick = Workers("pagemill-grammar", *(most for _, most in SLICES))
        self._slow = Workers("pagemill-slow-grammar", 1)

    def __len__(self) -> int:
        return len(self._pending)

    async def compiled(self, structured: StructuredOutput, client: str) -> Made:
        """Equal ones are compiled once. Raises QueueFull, NotServing."""
        pending = self._pending.get(structured)
        if pending is None:
            pending = self._begin(structured, client)
        pending.num_waiting += 1
        try:
            return await asyncio.shield(pending.future)  # who leaves takes nothing from others who want the same
        finally:
            pending.num_waiting -= 1
            if not pending.num_waiting and not pending.future.done():  # nobody is left: its place is for others
                del self._pending[structured]
                pending.future.cancel()

    def _begin(self, structured: StructuredOutput, client: str) -> Pending[Made]:
        _check_places(client, MAX_QUEUED, self._pending.values())
        pending = self._pending[structured] = Pending(client)
        pending.future = asyncio.ensure_future(self._tried(structured, pending))
        pending.future.add_done_callback(partial(self._arrived, structured))
        return pending

    async def _tried(self, structured: StructuredOutput, pending: Pending[Made]) -> Made:
        for level, (cpu_s, _) in enumerate(SLICES):
            work = partial(self._work, structured, min(cpu_s, self._limit_s))
            made = await self._quick.run(level, pending.client, work)
            if made is not None:
                return made
        _check_places(pending.client, MAX_SLOW, [each for each in self._pending.values() if each.is_slow])
        pending.is_slow = True
        made = await self._slow.run(0, pending.client, partial(self._work, structured, self._limit_s))
        assert made is not None
        return made

    def _arrived(self, structured: StructuredOutput, future: asyncio.Future[Made]) -> None:
        pending = self._pending.get(structured)
        if pending is not None and pending.future is future:
            del self._pending[structured]
        if not future.cancelled() and future.exception() is None:
            self._when_done(structured, future.result())

    def close(self) -> None:
        """What waits is refused."""
        self._quick.close()
        self._slow.close()


def _check_places(client: str, most: int, taken: Collection[Pending[Made]]) -> None:
    """Raises QueueFull."""
    if len(taken) >= most or sum(each.client == client for each in taken) >= most // CLIENT_SHARE:
        raise QueueFull("Too many grammars are being compiled. Please try again later.")
