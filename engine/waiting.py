"""`Waiting`: sequences that hold no row, and whose turn it is to get one.

Those that were preempted, or are further choices of a prompt that runs, come first: they had their turn. Then clients
take turns: next is the one whose virtual time is least, and virtual time is the tokens that a client was served over
its weight: of prompts when they are admitted, less what the cache had, of outputs as they come. Within a client lower
priority numbers come first, then who came first. Guarantees:
- clients that all want more get tokens in proportion to their weights, however many requests each has sent;
- who comes back starts where the others are: what a client left unused it has not saved up;
- a client alone is served first come, first served.

Outputs are counted when somebody is to be chosen, not token by token. (The idea is the virtual token counter of Sheng
et al., "Fairness in Serving Large Language Models", 2024.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from engine.sequence import Request, Sequence


class Line:
    """One client's. time: virtual, in tokens per weight."""

    __slots__ = ("num_live", "time", "waiting", "weight")

    def __init__(self) -> None:
        self.time = 0.0
        self.weight = 1.0
        self.num_live = 0  # sequences that have not ended
        self.waiting: deque[Sequence] = deque()


class Waiting:
    def __init__(self) -> None:
        self._resumed: deque[Sequence] = deque()
        self._lines: dict[str, Line] = {}  # of clients with sequences that have not ended
        self._left: dict[str, float] = {}  # client that has none -> its time; only while others have some
        self._passed: list[tuple[deque[Sequence], Sequence]] = []

    def __len__(self) -> int:
        return len(self._resumed) + sum([len(line.waiting) for line in self._lines.values()])

    def __bool__(self) -> bool:
        return bool(self._resumed) or any(line.waiting for line in self._lines.values())

    def __iter__(self) -> Iterator[Sequence]:
        """One client's after another's."""
        return chain(self._resumed, *(line.waiting for line in self._lines.values()))

    # -- coming and going

    def enter(self, request: Request, running: Iterable[Sequence]) -> None:
        """Its sequences will be added, and `leave` follows for each. running: who is served now."""
        terms = request.terms
        line = self._lines.setdefault(terms.client, Line())
        others = [other for other in self._lines.values() if other is not line]
        if others and not line.waiting:
            self.settle(running)
            line.time = max(line.time, self._left.pop(terms.client, 0.0), _where(others))
        line.weight = terms.weight
        line.num_live += len(request.sequences)

    def leave(self, sequence: Sequence) -> None:
        """It has ended, wherever it was."""
        self.charge(sequence)
        client = sequence.request.terms.client
        line = self._lines[client]
        line.num_live -= 1
        if line.num_live:
            return
        del self._lines[client]
        if self._lines:
            self._left[client] = line.time
        else:
            self._left.clear()

    def add(self, sequence: Sequence) -> None:
        """A new one, behind those of its client that are as urgent."""
        queue, priority = self._line(sequence).waiting, sequence.request.terms.priority
        if not queue or _priority(queue[-1]) <= priority:
            queue.append(sequence)
        else:
            queue.insert(bisect_right(queue, priority, key=_priority), sequence)

    def put_first(self, sequences: Iterable[Sequence]) -> None:
        """Before all others, in this order: they ran, or belong to one that does."""
        self._resumed.extendleft(reversed(list(sequences)))

    def remove(self, sequence: Sequence, heir: Sequence | None = None) -> bool:
        """Take it out; heir: gets its place. False if it was not here."""
        for queue in (self._resumed, self._line(sequence).waiting):
            if sequence in queue:
                place = queue.index(sequence)
                del queue[place]
                if heir is not None:
                    queue.insert(place, heir)
                return True
        return False

    # -- whose turn it is

    @property
    def first(self) -> Sequence:
        """Who is next; there must be somebody."""
        return self._first_queue()[0]

    def take(self) -> Sequence:
        """`first` gets a row."""
        return self._first_queue().popleft()

    def pass_over(self) -> None:
        """Let others before `first`, until `restore`."""
        queue = self._first_queue()
        self._passed.append((queue, queue.popleft()))

    def restore(self) -> None:
        while self._passed:
            queue, sequence = self._passed.pop()
            queue.appendleft(sequence)

    def _first_queue(self) -> deque[Sequence]:
        if self._resumed:
            return self._resumed
        return min([line for line in self._lines.values() if line.waiting], key=_turn).waiting

    # -- what was served

    def settle(self, running: Iterable[Sequence]) -> None:
        """Count what these have gained; before turns, unless one client is alone."""
        if len(self._lines) > 1:
            for sequence in running:
                self.charge(sequence)

    def admitted(self, sequence: Sequence) -> None:
        """Its known tokens will be computed, but for those that are."""
        num_new = len(sequence.token_ids) - max(sequence.num_computed_tokens, sequence.num_charged)
        if num_new > 0:
            self._serve(sequence, num_new)
            sequence.num_charged = len(sequence.token_ids)

    def charge(self, sequence: Sequence) -> None:
        """Count what it was served and not charged for. Recomputing is free: it did not ask for it."""
        num_new = sequence.high_water - sequence.num_charged
        if num_new > 0:
            self._serve(sequence, num_new)
            sequence.num_charged = sequence.high_water

    def _serve(self, sequence: Sequence, num_tokens: int) -> None:
        line = self._line(sequence)
        line.time += num_tokens / line.weight

    def _line(self, sequence: Sequence) -> Line:
        return self._lines[sequence.request.terms.client]


def _priority(sequence: Sequence) -> int:
    return sequence.request.terms.priority


def _turn(line: Line) -> tuple[float, int]:
    """Of those that are equal, the one that asks for less."""
    return line.time, line.num_live


def _where(lines: list[Line]) -> float:
    """The virtual time that clients have come to: those who wait, or, if nobody does, those who run."""
    return min([line.time for line in lines if line.waiting] or [line.time for line in lines])
