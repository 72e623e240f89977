"""Gemma's calls: call:NAME{key:VALUE,...} between marks. Strings stand between marks of their own, so they need no
escapes; keys are bare; numbers, lists and objects are as in JSON.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from server.parsers.blocks import BlockCalls
from server.parsers.json_text import escaped, expect, read_string, skip_space
from server.parsers.schema import ALL, Tools, typed
from server.parsers.script import MAX_DEPTH, MAX_NAME_CHARS, Malformed, Reading, any_mark

_CALL = any_mark("call:")
_NAME = re.compile(r"[^\n<>{]*")
_KEY = re.compile(r"[^:<>{}\[\],\"]*")
_SCALAR = re.compile(r"[^,}\]<\"]*")
MAX_SCALAR_CHARS = 4096


@dataclass(frozen=True)
class GemmaMarks:
    """open, close: around a call. quote: on both sides of a string."""

    open: str
    close: str
    quote: str


class GemmaCalls(BlockCalls):
    def __init__(self, marks: GemmaMarks, tools: Tools) -> None:
        super().__init__([marks.open], [marks.close])
        self._tools = tools
        self._close = any_mark(marks.close)
        self._quote = any_mark(marks.quote)

    def calls(self, mark: str) -> Reading[None]:
        reader = self.reader
        yield from skip_space(reader)
        if not (yield from reader.starts(_CALL)):
            raise Malformed
        name = (yield from reader.word(_NAME, MAX_NAME_CHARS)).strip()
        if (yield from reader.ahead()) != "{":
            raise Malformed
        self.begin(name)
        yield from self._object(name, 0)
        yield from skip_space(reader)
        yield from reader.starts(self._close)

    def _object(self, tool: str | None, depth: int) -> Reading[None]:
        """tool: whose arguments these are, for their types."""
        out, reader = self.out, self.reader
        yield from expect(reader, "{")
        separator = "{"
        while (character := (yield from skip_space(reader))) != "}":
            if character == ",":
                reader.take()
                continue
            key = yield from self._key(character)
            yield from expect(reader, ":")
            out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value(self._tools.types(tool, key) if tool else ALL, depth + 1)
        reader.take()
        out.arguments("{}" if separator == "{" else "}")

    def _key(self, character: str) -> Reading[str]:
        if (yield from self.reader.starts(self._quote)):
            key, _ = yield from self.reader.text_until(self._quote)
            return key
        if character == '"':
            return (yield from read_string(self.reader))
        key = (yield from self.reader.word(_KEY, MAX_NAME_CHARS)).strip()
        if not key:
            raise Malformed
        return key

    def _value(self, types: frozenset[str], depth: int) -> Reading[None]:
        if depth > MAX_DEPTH:
            raise Malformed
        out, reader = self.out, self.reader
        character = yield from skip_space(reader)
        if (yield from reader.starts(self._quote)):
            yield from self._string(types)
        elif character == '"':
            text = yield from read_string(reader)
            out.arguments(json.dumps(text, ensure_ascii=False) if "string" in types else typed(text, types))
        elif character == "{":
            yield from self._object(None, depth)
        elif character == "[":
            yield from self._list(depth)
        else:
            text = (yield from reader.word(_SCALAR, MAX_SCALAR_CHARS)).strip()
            if not text or (reader.ended and not (yield from reader.ahead())):
                raise Malformed
            out.arguments(typed(text, types))

    def _string(self, types: frozenset[str]) -> Reading[None]:
        out, reader = self.out, self.reader
        if "string" not in types:
            pieces: list[str] = []
            if (yield from reader.until(self._quote, pieces.append)) is None:
                raise Malformed
            out.arguments(typed("".join(pieces), types))
            return
        out.arguments('"')
        if (yield from reader.until(self._quote, lambda text: out.arguments(escaped(text)))) is None:
            raise Malformed
        out.arguments('"')

    def _list(self, depth: int) -> Reading[None]:
        out, reader = self.out, self.reader
        yield from expect(reader, "[")
        separator = "["
        while (character := (yield from skip_space(reader))) != "]":
            if character == ",":
                reader.take()
                continue
            out.arguments(separator)
            separator = ", "
            yield from self._value(ALL, depth + 1)
        reader.take()
        out.arguments("[]" if separator == "[" else "]")
