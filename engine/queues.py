"""Sequences that wait for a row and sequences that run, in their order.

Knows who stands where, and how a choice that was not yet forked from its prompt counts; decides nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from engine.sequence import Sequence, SequenceStatus
from engine.waiting import Waiting


class Queues:
    """running: in order of admission. num_unforked: sequences neither there nor waiting, that will be forked from one
    that is (its `siblings`)."""

    def __init__(self) -> None:
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self.num_unforked = 0

    @property
    def num_waiting(self) -> int:
        """Sequences that hold no row."""
        return len(self.waiting) + self.num_unforked

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of the waiting prompts, each counted once."""
        return sum(len(sequence.token_ids) for sequence in self.waiting)

    def add(self, primary: Sequence, siblings: list[Sequence]) -> None:
        """To the end of its client's line; the siblings will be forked from the primary."""
        primary.siblings = siblings
        self.num_unforked += len(siblings)
        self.waiting.add(primary)

    def put_back(self, sequence: Sequence) -> None:
        """From running to the front of waiting."""
        self.running.remove(sequence)
        self.waiting.put_first([sequence])
        sequence.status = SequenceStatus.WAITING

    def leave(self, sequence: Sequence) -> None:
        """Out of running, waiting or its primary's siblings; its own siblings get a new primary."""
        heir = self._heir(sequence)
        if sequence.status is SequenceStatus.RUNNING:
            self.running.remove(sequence)
            if heir is not None:
                self.waiting.put_first([heir])
        elif not self.waiting.remove(sequence, heir):
            primary = next(s for s in sequence.request.sequences if sequence in s.siblings)
            primary.siblings.remove(sequence)
            self.num_unforked -= 1

    def _heir(self, sequence: Sequence) -> Sequence | None:
        """The sibling from which the others will be forked instead; it waits from now on."""
        if not sequence.siblings:
            return None
        heir, *rest = sequence.siblings
        heir.num_scored_tokens = sequence.num_scored_tokens
        sequence.siblings, heir.siblings = [], rest
        self.num_unforked -= 1
        return heir

    def check(self, live: Collection[Sequence]) -> None:
        """Raises AssertionError unless exactly `live` stand here or will be forked. For tests."""
        assert set(self.running) == {s for s in live if s.status is SequenceStatus.RUNNING}
        unforked = [s for primary in live for s in primary.siblings]
        assert len(unforked) == self.num_unforked
        assert len(self.running) + len(self.waiting) + len(unforked) == len(live)
