"""What a model's text means: words for the reader, reasoning, tool calls. One interface for every format.

A parser sees the text of one choice as it comes, cut anywhere, and tells what each stretch is. The parts of all
`feed` calls and `finish`, joined, do not depend on where the text was cut.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Content(NamedTuple):
    """Text for the reader."""

    text: str


class Reasoning(NamedTuple):
    """Text of the model's thinking, without its marks."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins. index: 0, 1, ... within the choice; id: made by the server, or the model's own."""

    index: int  # type: ignore[assignment]  # the field hides tuple.index, which nobody calls
    id: str
    name: str


class CallArguments(NamedTuple):
    """More of a call's arguments: the texts of one index, joined, are a JSON object (unless the output was cut).
    is_whole: so they are with this text; more blanks or marks may come, but no more of the value."""

    index: int  # type: ignore[assignment]  # the field hides tuple.index, which nobody calls
    text: str
    is_whole: bool = False


Part = Content | Reasoning | CallBegin | CallArguments


class OutputParser(Protocol):
    """One choice. `feed` may hold back what could still become a mark; `finish` gives the rest up."""

    def feed(self, text: str) -> list[Part]:
        """Parts that are certain now."""

    def finish(self) -> list[Part]:
        """Nothing follows. A call that was cut keeps what came of it; text held back becomes content. Never raises."""
