"""The table of formats: how each writes calls, and the marks by which a chat template gives it away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from server.parsers.base import OutputParser
from server.parsers.json_calls import JsonCalls, JsonMarks
from server.parsers.schema import Tools


@dataclass(frozen=True)
class Kind:
    """One format. make: a parser for a request's tools. marks: texts that must reach the parser even where they are
    special tokens.

    written: the template has one of these sets of texts, all of it; known: the vocabulary has this token, which
    counts where the template tells no format."""

    name: str
    make: Callable[[Tools], OutputParser]
    marks: tuple[str, ...]
    written: tuple[tuple[str, ...], ...] = ()
    known: tuple[str, ...] = ()


def _json(name: str, marks: JsonMarks, *written: tuple[str, ...], known: tuple[str, ...] = ()) -> Kind:
    return Kind(name, lambda tools: JsonCalls(marks, tools), (*marks.open, *marks.close), written, known)


# In the order in which they are looked for: what is written in fewer formats comes first.
KINDS: tuple[Kind, ...] = (
    _json("nemotron", JsonMarks(("<TOOLCALL>",), ("</TOOLCALL>",)), ("<TOOLCALL>",)),
    _json("granite", JsonMarks(("<|tool_call|>",)), ("<|tool_call|>",), known=("<|tool_call|>",)),
    _json("hermes", JsonMarks(("<tool_call>",), ("</tool_call>",)), ("<tool_call>",), known=("<tool_call>",)),
    _json("tool_calls", JsonMarks(("<tool_calls>",), ("</tool_calls>",)), ("<tool_calls>",)),
    _json(
        "llama3_json",
        JsonMarks(("<|python_tag|>",), bare=True),
        ("<|python_tag|>",),
        ('"parameters": dictionary',),
        known=("<|python_tag|>",),
    ),
)
