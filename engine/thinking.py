"""Where a model's thinking ends: stop strings count only behind it.

Knows the text of one choice as it comes; knows no tokens. Nothing inside the thinking is held back.
"""

from __future__ import annotations

from engine.sampling_params import ReasoningMarks


class ThinkingGate:
    """Splits a text, cut anywhere, into what lies before the end of the thinking and what lies behind it."""

    __slots__ = ("_blanks", "_breaks", "_end", "_held", "_is_inside", "_is_over", "_start")

    def __init__(self, marks: ReasoningMarks) -> None:
        self._start, self._end = marks.start, marks.end
        self._is_inside = marks.opened
        self._is_over = not marks.opened and not marks.start  # no start mark: only a prompt can open the thinking
        self._breaks = False  # right behind the end mark: line breaks there belong to it
        self._blanks: list[str] = []  # before: blanks, held back one by one
        self._held = ""  # before: what may still become the start mark; inside: the end mark's beginning

    def feed(self, text: str) -> tuple[str, str]:
        """(text of the thinking, its marks and the line breaks at its end included; text behind it). Both may be
        empty: blanks and what may become the start mark are held back until it is clear which they are."""
        if self._is_over:
            return self._behind(text)
        if self._is_inside:
            return self._search(text)
        begun = self._held + text if self._held else text.lstrip()
        self._blanks.append(text[: len(self._held) + len(text) - len(begun)])
        if begun.startswith(self._start):
            self._is_inside, self._held = True, ""
            thinking, behind = self._search(begun[len(self._start) :])
            return "".join(self._blanks) + self._start + thinking, behind
        self._held = begun
        return ("", "") if self._start.startswith(begun) else ("", self.finish())

    def finish(self) -> str:
        """What was held back, once it is clear that it is no thinking."""
        held = "" if self._is_inside else "".join(self._blanks) + self._held
        self._is_over, self._held, self._blanks = True, "", []
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
