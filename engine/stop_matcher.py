"""Stop strings in streamed text: finds them across piece boundaries and holds back only what may become one.

All stop strings are compiled into one automaton (Aho and Corasick 1975): a state is the longest suffix of the text
so far that begins a stop string, so its depth is exactly the number of characters to hold back, and a character
costs the same whether there is one stop string or sixty-four.

Which match counts: the one that starts earliest in the text; of several that start there the shortest, since it is
complete first. A match may therefore wait while an earlier-starting candidate is still open ("abcd" and "bc" on
"abc"), and is settled by the next character or by `finish`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The compiled automaton: built once per request, shared by its choices, never changed. Empty strings are
    ignored. States are numbers, state 0 is the empty suffix."""

    __slots__ = ("depth", "ends", "fail", "firsts", "next")

    def __init__(self, stop: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.depth: list[int] = [0]  # characters of the state's string
        self.ends: list[int] = [0]  # length of the longest stop string that ends here, 0 for none
        self.fail: list[int] = [0]  # state of the longest proper suffix
        for text in stop:
            self._add(text)
        self._link()
        self.firsts = frozenset(self.next[0])  # characters that a stop string may begin with

    def _add(self, text: str) -> None:
        state = 0
        for char in text:
            if self.ends[state]:
                return  # a shorter stop string with the same start is always complete first
            following = self.next[state].get(char)
            if following is None:
                following = len(self.next)
                self.next[state][char] = following
                self.next.append({})
                self.depth.append(self.depth[state] + 1)
                self.ends.append(0)
                self.fail.append(0)
            state = following
        self.ends[state] = self.depth[state]

    def _link(self) -> None:
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self.next[state].items():
                self.fail[following] = self.step(self.fail[state], char)
                self.ends[following] = self.ends[following] or self.ends[self.fail[following]]
                queue.append(following)

    def step(self, state: int, char: str) -> int:
        """The state after `char`."""
        while True:
            following = self.next[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self.fail[state]


class StopMatcher:
    """One choice's search. After a hit (`feed` returned True, or `matched` is set after `finish`) the text returned
    so far ends right before the stop string, and further text is ignored."""

    __slots__ = ("_found", "_held", "_state", "_stop", "matched")

    def __init__(self, stop: StopStrings | Sequence[str]) -> None:
        self._stop = stop if isinstance(stop, StopStrings) else StopStrings(stop)
        self._state = 0
        self._held = ""
        self._found: tuple[int, int] | None = None  # start and end, in characters of the held text
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """(text that no stop string can claim any more, whether a stop string was found)."""
        if self.matched is not None:
            return "", True
        stop, state = self._stop, self._state
        if state == 0 and stop.firsts.isdisjoint(text):
            return text, False
        held = self._held + text
        for end in range(len(self._held) + 1, len(held) + 1):
            state = stop.step(state, held[end - 1])
            if length := stop.ends[state]:
                start = end - length
                if self._found is None or start < self._found[0]:
                    self._found = (start, end)
            if self._found is not None and end - stop.depth[state] >= self._found[0]:
                return self._settle(held), True
        self._state = state
        keep = stop.depth[state]
        if self._found is not None:  # an earlier start is still open: it lies within the kept text
            self._found = (self._found[0] - (len(held) - keep), self._found[1] - (len(held) - keep))
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def finish(self) -> str:
        """The held text once nothing follows: no stop string, unless `matched` is set now."""
        held, self._held = self._held, ""
        if self._found is not None and self.matched is None:
            return self._settle(held)
        return held

    def _settle(self, held: str) -> str:
        assert self._found is not None
        start, end = self._found
        self.matched = held[start:end]
        self._held = ""
        return held[:start]
