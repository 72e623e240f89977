"""How far a start has come: written by the thread that loads, read by whoever shows it."""

from __future__ import annotations


class Progress:
    """phase: what is being done, one word; empty before there is anything. done, total: of this phase, bytes; total is
    0 where nobody knows how much there is."""

    __slots__ = ("done", "phase", "total")

    def __init__(self) -> None:
        self.phase = ""
        self.done = self.total = 0

    def enter(self, phase: str) -> None:
        self.phase, self.done, self.total = phase, 0, 0

    @property
    def share(self) -> float | None:
        """Of this phase, 0 to 1; None where nobody knows."""
        total = self.total
        return min(1.0, self.done / total) if total else None
