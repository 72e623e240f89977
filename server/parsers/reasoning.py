"""Thinking before the answer: which marks a model puts around it, and a parser that splits it off.

Line breaks next to the marks belong to the marks: templates write them around the text they are handed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.sampling_params import ReasoningMarks
from server.parsers.base import OutputParser, Part
from server.parsers.script import SPACE, Reading, Script, any_mark

_LINE_BREAKS = re.compile(r"\n*")


@dataclass(frozen=True)
class ReasoningFormat:
    """name: for the flag. start, end: the marks as text."""

    name: str
    start: str
    end: str

    def marks(self, opened: bool) -> ReasoningMarks:
        """opened: the prompt ends inside the block."""
        return ReasoningMarks(self.start, self.end, opened)

    def is_open(self, prompt: str) -> bool:
        """Whether the rendered prompt (its tail is enough) ends inside the block."""
        return prompt.rfind(self.start.strip()) > prompt.rfind(self.end.strip())


FORMATS: dict[str, ReasoningFormat] = {
    made.name: made
    for made in (
        ReasoningFormat("think", "<think>", "</think>"),
        ReasoningFormat("seed", "<seed:think>", "</seed:think>"),
        ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("thinking", "<thinking>", "</thinking>"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat("harmony", "<|channel|>analysis<|message|>", "<|end|>"),
    )
}


def with_reasoning(inner: OutputParser, marks: ReasoningMarks) -> ReasoningParser:
    """`inner` reads what comes after the thinking."""
    return ReasoningParser(inner, marks)


class ReasoningParser(Script):
    """Reasoning first, then the parts of the inner parser.

    is_reasoning: the end mark has not come, and thinking has begun or still may."""

    def __init__(self, inner: OutputParser, marks: ReasoningMarks) -> None:
        self._inner = inner
        self._rest: list[Part] = []
        self._opened = marks.opened
        self._start = any_mark(marks.start.strip())
        self._end = any_mark(marks.end.strip())
        self._breaks: list[str] = []
        self._has_words = False
        self._is_through = False  # with the line breaks after the end mark, too
        self.is_reasoning = True
        super().__init__()

    def feed(self, text: str) -> list[Part]:
        if self._is_through:
            return self._inner.feed(text)
        return super().feed(text) + self._take_rest()

    def finish(self) -> list[Part]:
        thoughts = [] if self._is_through else super().finish()
        return thoughts + self._take_rest() + self._inner.finish()

    def script(self) -> Reading[None]:
        reader = self.reader
        reader.remember()
        yield from reader.run(SPACE)
        mark = yield from reader.starts(self._start)
        blanks = reader.forget() or ""
        if mark is None and not self._opened:
            self._feed_inner(blanks)
        else:
            self._think("" if mark else blanks)
            yield from reader.until(self._end, self._think)
            self.is_reasoning = False
            yield from reader.run(_LINE_BREAKS)
        self.is_reasoning = False
        self._is_through = True
        yield from reader.until(any_mark(), self._feed_inner)

    def _think(self, text: str) -> None:
        text = text if self._has_words else text.lstrip("\n")
        words = text.rstrip("\n")
        if words:
            self._has_words = True
            self.out.reasoning("".join(self._breaks) + words)
            self._breaks.clear()
        if len(words) < len(text):
            self._breaks.append(text[len(words) :])

    def _feed_inner(self, text: str) -> None:
        self._rest += self._inner.feed(text) if text else []

    def _take_rest(self) -> list[Part]:
        rest, self._rest = self._rest, []
        return rest
