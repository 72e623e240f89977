"""Which stretches of a model's text are content, so that stop strings are looked for nowhere else."""

from __future__ import annotations

from itertools import pairwise

from server.parsers.script import Script


class ContentGate:
    """engine.text's StopGate over a parser of its own: the text comes out as it went in, cut into content and the rest
    (calls, with their marks and the blanks that belong to them). What may still become either is held back."""

    def __init__(self, parser: Script) -> None:
        """parser: fresh."""
        self._parser = parser
        self._pieces: list[str] = []  # what is held back
        self._start = 0  # characters before them
        self._spans: list[tuple[int, int]] = []  # of content in the held text, in characters of the whole
        parser.out.on_content = self._note

    def feed(self, text: str) -> list[tuple[str, bool]]:
        self._pieces.append(text)
        self._parser.feed(text)
        return self._release(self._parser.reader.decided)

    def finish(self) -> list[tuple[str, bool]]:
        self._parser.finish()
        return self._release(self._parser.reader.decided)

    def _note(self, text: str) -> None:
        """The parser says as content what it has just read."""
        end = self._parser.reader.position
        if text:
            self._spans.append((end - len(text), end))

    def _release(self, end: int) -> list[tuple[str, bool]]:
        if end <= self._start:
            return []
        held = "".join(self._pieces)
        places = [place for span in self._spans for place in span]
        cuts = [place - self._start for place in (self._start, *places, end)]
        # every second stretch lies inside a span
        stretches = [(held[a:b], k % 2 == 1) for k, (a, b) in enumerate(pairwise(cuts)) if a < b]
        self._pieces = [held[end - self._start :]]
        self._spans.clear()
        self._start = end
        return stretches
