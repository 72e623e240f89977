"""Where a model's thinking ends: stop strings count only behind it.

Knows the text of one choice as it comes; knows no tokens. Nothing inside the thinking is held back.
"""

from __future__ import annotations

from engine.sampling_params import ReasoningMarks


class ThinkingGate:
    """Splits a text, cut anywhere, into what lies before the end of the thinking and what lies behind it."""

    __slots__ = ("_breaks", "_end", "_held", "_is_inside", "_is_over", "_start")

    def __init__(self, marks: ReasoningMarks) -> None:
        self._start, self._end = marks.start, marks.end
        self._is_inside = marks.opened
        self._is_over = not marks.opened and not marks.start  # no start mark: only a prompt can open the thinking
        self._breaks = False  # right behind the end mark: line breaks there belong to it
        self._held = ""  # before: all text, while it may still become the start mark; inside: the end mark's beginning

    def feed(self, text: str) -> tuple[str, str]:
        """(text of the thinking, its marks and the line breaks at its end included; text behind it). Both may be
        empty: blanks and what may become the start mark are held back until it is clear which they are."""
        if self._is_over:
            return self._behind(text)
        if self._is_inside:
            return self._search(text)
        self._held += text
        begun = self._held.lstrip()
        if begun.startswith(self._start):
            self._is_inside, text, self._held = True, self._held, ""
            after = text.index(self._start) + len(self._start)
            thinking, behind = self._search(text[after:])
            return text[:after] + thinking, behind
        if self._start.startswith(begun):
            return "", ""
        return "", self.finish()

    def finish(self) -> str:
        """What was held back, once it is clear that it is no thinking."""
        held, self._held = ("" if self._is_inside else self._held), ""
        self._is_over = True
        return held

    def _search(self, text: str) -> tuple[str, str]:
        """The end mark may be cut between two texts: as much as could begin it is remembered, but not held back."""
        seen = self._held + text
        at = seen.find(self._end)
        if at < 0:
            self._held = seen[max(0, len(seen) - len(self._end) + 1) :]
            return text, ""
        cut = at + len(self._end) - len(self._held)
        self._is_over, self._breaks, self._held = True, True, ""
        breaks, behind = self._behind(text[cut:])
        return text[:cut] + breaks, behind

    def _behind(self, text: str) -> tuple[str, str]:
        behind = text.lstrip("\n") if self._breaks else text
        self._breaks = self._breaks and not behind
        return text[: len(text) - len(behind)], behind
