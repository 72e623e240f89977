"""Calls as JSON objects, {"name": ..., "arguments": {...}}, between marks: hermes and Qwen, Granite, Mistral's
older lists, Llama 3, Nemotron and others. A table says which marks; objects may stand alone, in a list, or one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from server.parsers.blocks import BlockCalls
from server.parsers.json_text import expect, pass_value, read_string, skip_space
from server.parsers.schema import Tools
from server.parsers.script import Malformed, Reading, new_call_id

_NAMES = ("name", "tool_name", "function")
_ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class JsonMarks:
    """open, close: around the calls of a block; no close: the list's or the object's end ends the block.
    bare: a call may also stand at the very beginning without a mark; it then must name one of the tools."""

    open: tuple[str, ...]
    close: tuple[str, ...] = ()
    bare: bool = False


@dataclass
class _Call:
    """What is known of the object being read. early: arguments that came before the name."""

    must_be_known: bool
    name: str | None = None
    begun: bool = False
    early: list[str] = field(default_factory=list)
    has_arguments: bool = False


class JsonCalls(BlockCalls):
    def __init__(self, marks: JsonMarks, tools: Tools, new_id: Callable[[], str] = new_call_id) -> None:
        super().__init__(marks.open, marks.close, new_id)
        self._marks = marks
        self._tools = tools

    def script(self) -> Reading[None]:
        mark = (yield from self.block("")) if self._marks.bare else None
        yield from self.read_on(mark)

    def calls(self, mark: str) -> Reading[None]:
        """Objects and lists of them up to the close mark; without one, the end of the outermost."""
        bare = not mark
        reader, depth, num_before = self.reader, 0, self.out.num_calls
        while True:
            character = yield from skip_space(reader)
            has_calls = self.out.num_calls > num_before
            if found := (yield from reader.starts(self._any)):
                bare = False
                if found in self._marks.close:
                    break
            elif character == "{":
                if has_calls:  # each later call is remembered on its own
                    reader.remember()
                yield from self.call(_Call(must_be_known=bare))
                reader.remember()
            elif character == "[" and depth < 2:
                reader.take()
                depth += 1
            elif has_calls and character and character in "]},;":  # a bracket too many is a common slip
                depth -= reader.take() == "]"
                if not depth and character == "]" and not self._marks.close:
                    break
            else:
                break
        if self.out.num_calls == num_before:
            raise Malformed
        trail = reader.forget() or ""
        if not found and not trail.strip():
            self.out.content(trail)

    def call(self, call: _Call) -> Reading[None]:
        """One object. Raises Malformed, with the text remembered unless the call began."""
        self.broken = self.out.content
        try:
            yield from self._object(call, 0)
        except Malformed:
            if call.begun and not call.has_arguments and not self.reader.ended:
                self.out.arguments("{}")
            raise
        if call.name is None or (call.must_be_known and not call.has_arguments):
            raise Malformed
        if not call.begun:
            self._begin(call)
        if not call.has_arguments:
            self.out.arguments("{}")

    def _object(self, call: _Call, depth: int) -> Reading[None]:
        yield from expect(self.reader, "{")
        while (yield from skip_space(self.reader)) != "}":
            key = yield from read_string(self.reader)
            yield from expect(self.reader, ":")
            character = yield from skip_space(self.reader)
            yield from self._member(call, key, character, depth)
            if (yield from skip_space(self.reader)) == ",":
                self.reader.take()
        self.reader.take()

    def _member(self, call: _Call, key: str, character: str, depth: int) -> Reading[None]:
        if character == '"' and key in _NAMES and call.name is None:
            call.name = yield from read_string(self.reader)
            if not call.must_be_known:
                self._begin(call)
            elif call.name not in self._tools.names:
                raise Malformed
        elif key == "function" and character == "{" and not depth:
            yield from self._object(call, 1)
        elif key in _ARGUMENTS and not call.has_arguments:
            yield from self._arguments(call, character)
        else:
            yield from pass_value(self.reader, _drop)

    def _arguments(self, call: _Call, character: str) -> Reading[None]:
        if call.name is not None and not call.begun:
            self._begin(call)
        sink = self.out.arguments if call.begun else call.early.append
        call.has_arguments = True
        if character == '"':  # JSON inside a string
            sink((yield from read_string(self.reader)).strip() or "{}")
        elif character == "n":
            yield from pass_value(self.reader, _drop)
            sink("{}")
        else:
            self.broken = sink
            yield from pass_value(self.reader, sink)
            self.broken = self.out.content

    def _begin(self, call: _Call) -> None:
        self.begin(call.name or "")
        call.begun = True
        for text in call.early:
            self.out.arguments(text)
        call.early.clear()


def _drop(_: str) -> None:
    """For what nobody needs."""
