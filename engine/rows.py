"""Rows and blocks of running sequences, from the step that admits them to the last step that names them.

Knows who holds a row; decides nothing about who should. A sequence that ends or is preempted while a step in
flight still names it keeps its row and blocks until that step retires: nothing is reused under a running step.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush

from engine.kv.manager import KVCacheManager
from engine.sequence import Sequence


class RowPool:
    """num_rows rows, the lowest handed out first."""

    def __init__(self, num_rows: int, manager: KVCacheManager) -> None:
        self.num_rows = num_rows
        self.num_reserved = 0  # free rows that are promised to beam searches
        self.num_releasing = 0  # sequences that have left but are still named by a step in flight
        self._manager = manager
        self._free = list(range(num_rows))
        self._freed: list[int] = []

    @property
    def has_free(self) -> bool:
        return self.num_free > 0

    @property
    def num_free(self) -> int:
        """Rows that anybody may take."""
        return len(self._free) - self.num_reserved

    def take(self, sequence: Sequence) -> None:
        sequence.row = heappop(self._free)

    def leave(self, sequence: Sequence) -> None:
        """The sequence runs no more; it gives back what it holds, if anything, as soon as no step names it."""
        if sequence.row is None or sequence.releasing:
            return
        if sequence.num_steps_in_flight:
            sequence.releasing = True
            self.num_releasing += 1
        else:
            self._release(sequence)

    def retire(self, sequence: Sequence) -> None:
        """A step that names the sequence has retired."""
        if sequence.releasing and not sequence.num_steps_in_flight:
            self.num_releasing -= 1
            self._release(sequence)

    def take_freed(self) -> tuple[int, ...]:
        """Rows given back since the last call that the runner knows, whoever has them by now."""
        freed = tuple(self._freed)
        self._freed.clear()
        return freed

    def check(self, holders: Iterable[Sequence]) -> None:
        """Raises AssertionError unless `holders` and the free rows are all rows, each once. For tests."""
        holders = list(holders)
        rows = [sequence.row for sequence in holders if sequence.row is not None]
        assert sorted(rows + self._free) == list(range(self.num_rows)), "every row once"
        assert 0 <= self.num_reserved <= len(self._free), "promised rows are free"
        assert self.num_releasing == sum(sequence.releasing for sequence in holders)
        assert all(sequence.num_steps_in_flight for sequence in holders if sequence.releasing)
        self._manager.check(holders)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._manager.free(sequence)
        if sequence.num_told_tokens:
            self._freed.append(sequence.row)
        sequence.num_told_tokens = 0
        heappush(self._free, sequence.row)
        sequence.row = None
