"""Whose turn it is at the workers that try grammars: cheap work first, and one client after the other.

All of it runs on the event loop; no locks.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence

PATIENCE = 8


class Turns:
    """most: by level, from the cheapest, how many workers may be at work of that level; the first entry is the number
    of workers. Cheaper levels come first, but for one turn in `PATIENCE`; within a level clients take turns."""

    def __init__(self, most: Sequence[int]) -> None:
        self._most = tuple(most)
        self._busy = [0] * len(most)
        self._passed = [0] * len(most)  # turns of others since a level waits
        self._waiting: list[OrderedDict[str, deque[asyncio.Future[None]]]] = [OrderedDict() for _ in most]

    async def take(self, level: int, client: str) -> None:
        """Returns when a worker is free for this; `give` must follow. Who is cancelled has taken none."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting[level].setdefault(client, deque()).append(turn)
        self._serve()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(level)
            raise

    def give(self, level: int) -> None:
        """The worker is free again."""
        self._busy[level] -= 1
        self._serve()

    def _serve(self) -> None:
        while sum(self._busy) < self._most[0]:
            ready = [level for level, waiting in enumerate(self._waiting) if waiting and self._may_have(level)]
            if not ready:
                return
            level = next((level for level in ready if self._passed[level] >= PATIENCE), ready[0])
            for other in ready:
                self._passed[other] = 0 if other == level else self._passed[other] + 1
            self._serve_one(level)

    def _may_have(self, level: int) -> bool:
        return self._busy[level] < self._most[level]

    def _serve_one(self, level: int) -> None:
        waiting = self._waiting[level]
        client, turns = waiting.popitem(last=False)
        turn = turns.popleft()
        if turns:
            waiting[client] = turns  # behind all others
        if not turn.done():  # else whoever waited has left
            self._busy[level] += 1
            turn.set_result(None)
