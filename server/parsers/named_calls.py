"""Calls whose name stands between marks and whose arguments are JSON: DeepSeek's markup, Kimi K2, Mistral's newer
form, functions in one tag.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from server.parsers.blocks import BlockCalls
from server.parsers.json_calls import JsonCalls, JsonMarks
from server.parsers.json_text import skip_space
from server.parsers.schema import Tools
from server.parsers.script import MAX_NAME_CHARS, Malformed, Reading, any_mark, new_short_id

_NAME = re.compile(r"[^\n{\[<>|]*")
_ID = re.compile(r"\w*")
_FENCE = any_mark("```json")
_FENCE_END = any_mark("```")
_NUMBERED = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


@dataclass(frozen=True)
class NamedMarks:
    """open, close: around all calls, if the format has such marks. call, name_end, end: around the name, and after
    the arguments.

    kind_first: a word for the kind of tool may stand where the name is expected; then the name has the line after
    the mark, and the arguments are fenced as a listing of code. numbered: the name is part of the call's id, as in
    functions.NAME:0."""

    call: str
    name_end: str
    end: str
    open: str = ""
    close: str = ""
    kind_first: bool = False
    numbered: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.open, self.call, self.name_end, self.end, self.close)))


class NamedCalls(BlockCalls):
    def __init__(self, marks: NamedMarks) -> None:
        super().__init__((marks.open, marks.call), (marks.end, marks.close))
        self._marks = marks
        self._name_end = any_mark(marks.name_end)

    def calls(self, mark: str) -> Reading[None]:
        marks, reader = self._marks, self.reader
        if mark == marks.open:
            yield from skip_space(reader)
        while mark:
            if mark == marks.call:
                yield from self._call()
                reader.remember()
            elif mark == marks.close:
                if not self.out.num_calls:
                    raise Malformed
                return
            yield from skip_space(reader)
            mark = (yield from reader.starts(self._any)) or ""
        trail = reader.forget() or ""
        self.out.content(trail)

    def _call(self) -> Reading[None]:
        marks, reader = self._marks, self.reader
        name = (yield from reader.word(_NAME, MAX_NAME_CHARS)).strip()
        if not (yield from reader.starts(self._name_end)):
            raise Malformed
        is_fenced = marks.kind_first and (yield from reader.ahead()) != "{"
        if is_fenced:
            name = (yield from reader.word(_NAME, MAX_NAME_CHARS)).strip()
            if not (yield from skip_space(reader)):
                raise Malformed
            yield from reader.starts(_FENCE)
        numbered = _NUMBERED.fullmatch(name) if marks.numbered else None
        self.begin(numbered["name"] if numbered else name, name if numbered else None)
        yield from self.pass_arguments(end=marks.end)
        yield from skip_space(reader)
        if is_fenced:
            yield from reader.starts(_FENCE_END)
            yield from skip_space(reader)


class MistralCalls(JsonCalls):
    """[TOOL_CALLS] and a list of objects, or NAME[ARGS]{...}, or NAME[CALL_ID]ID[ARGS]{...}, mark and all again for
    every call."""

    OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"

    def __init__(self, tools: Tools, new_id: Callable[[], str] = new_short_id) -> None:
        super().__init__(JsonMarks((self.OPEN,)), tools, new_id)
        self._call_id = any_mark(self.CALL_ID)
        self._arguments_mark = any_mark(self.ARGUMENTS)

    def calls(self, mark: str) -> Reading[None]:
        reader = self.reader
        if (yield from skip_space(reader)) in ("[", "{"):
            yield from super().calls(mark)
            return
        name = (yield from reader.word(_NAME, MAX_NAME_CHARS)).strip()
        own_id = None
        if (yield from reader.starts(self._call_id)):
            own_id = yield from reader.word(_ID, MAX_NAME_CHARS)
        if not (yield from reader.starts(self._arguments_mark)) and (yield from reader.ahead()) != "{":
            raise Malformed
        self.begin(name, own_id if own_id and len(own_id) == 9 else None)
        yield from self.pass_arguments()
