"""Work in threads, by turns of those who ask: one client's many long prompts do not hold up another's short one.

On the event loop. A client never has all the threads that there are for this, if there is more than one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

Args = ParamSpec("Args")
Result = TypeVar("Result")
Line = deque[asyncio.Future[None]]


class Turns:
    def __init__(self, num_threads: int) -> None:
        self._num_free = num_threads
        self._most = max(1, num_threads - 1)  # of one client
        self._busy: Counter[str] = Counter()
        self._lines: dict[str, Line] = {}  # of clients that wait; who had no turn for the longest time comes first

    async def run(self, client: str, work: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
        """`work` in a thread, when it is this client's turn."""
        await self._turn(client)
        working = asyncio.ensure_future(asyncio.to_thread(work, *args, **kwargs))
        working.add_done_callback(lambda _: self._end(client))  # who is cancelled still has a thread until then
        return await asyncio.shield(working)

    async def _turn(self, client: str) -> None:
        if client not in self._lines and self._may_begin(client):
            self._begin(client)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lines.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # it was its turn
                self._end(client)
            raise

    def _may_begin(self, client: str) -> bool:
        return self._num_free > 0 and self._busy[client] < self._most

    def _begin(self, client: str) -> None:
        self._num_free -= 1
        self._busy[client] += 1

    def _end(self, client: str) -> None:
        self._num_free += 1
        self._busy[client] -= 1
        if not self._busy[client]:
            del self._busy[client]
        while (next_ := next(filter(self._may_begin, self._lines), None)) is not None:
            self._call(next_)

    def _call(self, client: str) -> None:
        """The first of its line that still waits; the client goes to the end of all."""
        line = self._lines.pop(client)
        while line:
            mine = line.popleft()
            if not mine.done():
                self._begin(client)
                mine.set_result(None)
                break
        if line:
            self._lines[client] = line
