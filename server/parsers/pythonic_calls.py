"""Calls written as Python: [name(key="value", other=[1, True])], bare or between marks. Llama 4, LFM2, Olmo, ToolACE.

Values are literals. Some templates put strings between quotes without escaping what is inside, so a quote ends a
string only where a comma or a bracket, or nothing, follows.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from server.parsers.blocks import BlockCalls
from server.parsers.json_text import escaped, expect, skip_space
from server.parsers.schema import ALL, Tools, typed
from server.parsers.script import MAX_DEPTH, MAX_NAME_CHARS, Malformed, Reading, Sink, any_mark

_NAME = re.compile(r"[\w.\-]*")
_KEY = re.compile(r"\w*")
_SCALAR = re.compile(r"[^,)\]}:\s\"']*")
_AFTER_STRING = any_mark(",", ")", "]", "}", ":")
_IN_STRING = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "b": "\b", "f": "\f", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_SCALAR_CHARS = 4096


@dataclass(frozen=True)
class PythonicMarks:
    """open, close: around the list, if the format has such marks. bare: a list may also stand at the very beginning;
    its first call must then name one of the tools."""

    open: str = ""
    close: str = ""
    bare: bool = False


class PythonicCalls(BlockCalls):
    def __init__(self, marks: PythonicMarks, tools: Tools) -> None:
        super().__init__([marks.open], [marks.close])
        self._bare = marks.bare
        self._tools = tools
        self._close = any_mark(marks.close)

    def script(self) -> Reading[None]:
        mark = (yield from self.block("")) if self._bare else None
        yield from self.read_on(mark)

    def calls(self, mark: str) -> Reading[None]:
        reader, num_before = self.reader, self.out.num_calls
        is_list = (yield from skip_space(reader)) == "["
        if is_list:
            reader.take()
        elif not mark:
            raise Malformed
        while True:
            character = yield from skip_space(reader)
            if (yield from reader.starts(self._close)):
                return self._check(num_before)
            if character == "]" and is_list:
                reader.take()
                is_list = False
                if not self._close.texts:
                    return self._check(num_before)
            elif character and character in ",;" and self.out.num_calls > num_before:
                reader.take()
            elif character and _NAME.fullmatch(character) and (is_list or self._close.texts):
                yield from self._call(must_be_known=not mark)
                reader.remember()
            else:
                trail = reader.forget() if self.out.num_calls > num_before else None
                if trail is None:
                    raise Malformed
                self.out.content(trail)
                return None

    def _check(self, num_before: int) -> None:
        if self.out.num_calls == num_before:
            raise Malformed

    def _call(self, *, must_be_known: bool) -> Reading[None]:
        reader, out = self.reader, self.out
        name = yield from reader.word(_NAME, MAX_NAME_CHARS)
        if (yield from skip_space(reader)) != "(" or (must_be_known and name not in self._tools.names):
            raise Malformed
        self.begin(name)
        reader.take()
        positions = iter(self._tools.arguments(name))
        separator = "{"
        while (character := (yield from skip_space(reader))) != ")":
            if character == ",":
                reader.take()
                continue
            word = yield from reader.word(_KEY, MAX_NAME_CHARS)
            if word and (yield from skip_space(reader)) == "=":
                reader.take()
                key, word = word, ""
            else:
                key = next(positions, "")
            if not key:
                raise Malformed
            out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            separator = ", "
            yield from self._value(self._tools.types(name, key), 1, word)
        reader.take()
        out.arguments("{}" if separator == "{" else "}")

    def _value(self, types: frozenset[str], depth: int, begun: str = "") -> Reading[None]:
        """begun: the start of the value, already taken."""
        if depth > MAX_DEPTH:
            raise Malformed
        reader, out = self.reader, self.out
        character = "" if begun else (yield from skip_space(reader))
        if character and character in "'\"" and "string" in types:
            out.arguments('"')
            yield from self._string(lambda text: out.arguments(escaped(text)))
            out.arguments('"')
        elif character and character in "'\"":
            pieces: list[str] = []
            yield from self._string(pieces.append)
            out.arguments(typed("".join(pieces), types))
        elif character and character in "[(":
            yield from self._list(depth)
        elif character == "{":
            yield from self._dict(depth)
        else:
            text = begun + (yield from reader.word(_SCALAR, MAX_SCALAR_CHARS))
            if not text or not (yield from reader.ahead()):
                raise Malformed
            out.arguments(typed(text, types))

    def _list(self, depth: int) -> Reading[None]:
        reader, out = self.reader, self.out
        end = "]" if reader.take() == "[" else ")"
        separator = "["
        while (character := (yield from skip_space(reader))) != end:
            if character == ",":
                reader.take()
                continue
            out.arguments(separator)
            separator = ", "
            yield from self._value(ALL, depth + 1)
        reader.take()
        out.arguments("[]" if separator == "[" else "]")

    def _dict(self, depth: int) -> Reading[None]:
        reader, out = self.reader, self.out
        reader.take()
        separator = "{"
        while (character := (yield from skip_space(reader))) != "}":
            if character == ",":
                reader.take()
                continue
            out.arguments(separator)
            separator = ", "
            if character and character in "'\"":
                yield from self._value(frozenset(("string",)), depth + 1)
            else:
                word = yield from reader.word(_KEY, MAX_NAME_CHARS)
                if not word:
                    raise Malformed
                out.arguments(json.dumps(word, ensure_ascii=False))
            yield from expect(reader, ":")
            out.arguments(": ")
            yield from self._value(ALL, depth + 1)
        reader.take()
        out.arguments("{}" if separator == "{" else "}")

    def _string(self, sink: Sink) -> Reading[None]:
        """The text between quotes, one or three of them."""
        reader = self.reader
        quote = reader.take()
        is_long = (yield from reader.ahead(2)) == 2 * quote
        if is_long:
            reader.take(2)
        while True:
            yield from reader.run(_IN_STRING[quote], sink)
            character = yield from reader.ahead()
            if not character:
                raise Malformed
            if character == "\\":
                yield from self._escape(sink)
            elif is_long and (yield from reader.ahead(3)) == 3 * quote:
                reader.take(3)
                return
            else:
                reader.take()
                if not is_long and (yield from reader.is_followed_by(_AFTER_STRING)):
                    return
                sink(quote)

    def _escape(self, sink: Sink) -> Reading[None]:
        reader = self.reader
        pair = yield from reader.ahead(2)
        letter = pair[1:]
        if count := _HEX_DIGITS.get(letter):
            code = (yield from reader.ahead(2 + count))[2:]
            if len(code) == count and re.fullmatch("[0-9A-Fa-f]+", code) and _is_character(int(code, 16)):
                reader.take(2 + count)
                sink(chr(int(code, 16)))
                return
        elif letter in _ESCAPES:
            reader.take(2)
            sink(_ESCAPES[letter])
            return
        sink(reader.take(1))


def _is_character(code: int) -> bool:
    return code < 0xD800 or 0xDFFF < code < 0x110000
