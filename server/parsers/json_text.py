"""JSON read as it comes: passed on as it is written, mended where models slip inside strings."""

from __future__ import annotations

import json
import re

from server.parsers.script import SPACE, Malformed, Reader, Reading, Sink

_IN_STRING = re.compile(r'[^"\\\x00-\x1f]*')
_BETWEEN = re.compile(r"[\sA-Za-z0-9+\-.,:]*")  # what JSON has outside strings, brackets aside
_SCALAR = re.compile(r"[A-Za-z0-9+\-.]*")
_HEX = re.compile(r"\\u[0-9A-Fa-f]{4}")
MAX_SCALAR_CHARS = 4096


def pass_value(reader: Reader, sink: Sink) -> Reading[None]:
    """One JSON value, with its text to `sink`. Raises Malformed where something stands that JSON has not, and at the
    end. Structure is followed by brackets only; a grammar or the client finds the rest."""
    first = yield from reader.ahead()
    if first == '"':
        yield from pass_string(reader, sink)
    elif first and first in "{[":
        yield from _pass_nested(reader, sink)
    else:
        scalar = yield from reader.word(_SCALAR, MAX_SCALAR_CHARS)
        if not scalar:
            raise Malformed
        sink(scalar)


def _pass_nested(reader: Reader, sink: Sink) -> Reading[None]:
    depth = 0
    while True:
        character = yield from reader.ahead()
        if character == '"':
            yield from pass_string(reader, sink)
        elif character and character in "{[":
            sink(reader.take())
            depth += 1
        elif character and character in "}]":
            sink(reader.take())
            depth -= 1
            if not depth:
                return
        elif character and _BETWEEN.fullmatch(character):
            yield from reader.run(_BETWEEN, sink)
        else:
            raise Malformed


def pass_string(reader: Reader, sink: Sink) -> Reading[None]:
    """One JSON string. Control characters get their escapes, a backslash that begins none is doubled."""
    sink(reader.take())
    while True:
        yield from reader.run(_IN_STRING, sink)
        character = yield from reader.ahead()
        if not character:
            raise Malformed
        if character == '"':
            sink(reader.take())
            return
        if character == "\\":
            yield from _pass_escape(reader, sink)
        else:
            sink(escaped(reader.take()))


def _pass_escape(reader: Reader, sink: Sink) -> Reading[None]:
    pair = yield from reader.ahead(2)
    if len(pair) < 2:
        reader.take()
        raise Malformed
    if pair[1] == "u":
        six = yield from reader.ahead(6)
        if _HEX.fullmatch(six):
            sink(reader.take(6))
            return
    elif pair[1] in '"\\/bfnrt':
        sink(reader.take(2))
        return
    reader.take()
    sink("\\\\")


def read_string(reader: Reader) -> Reading[str]:
    """The text that a JSON string stands for. Raises Malformed if there is none."""
    if (yield from reader.ahead()) != '"':
        raise Malformed
    pieces: list[str] = []
    yield from pass_string(reader, pieces.append)
    return well_formed(json.loads("".join(pieces)))


def skip_space(reader: Reader) -> Reading[str]:
    """Takes blanks; the character after them, "" at the end."""
    yield from reader.run(SPACE)
    return (yield from reader.ahead())


def expect(reader: Reader, character: str) -> Reading[None]:
    """Takes `character`, after blanks. Raises Malformed if another stands there."""
    if (yield from skip_space(reader)) != character:
        raise Malformed
    reader.take()


def escaped(text: str) -> str:
    """`text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def well_formed(text: str) -> str:
    """Lone surrogates, which JSON can spell, become U+FFFD: no answer could carry them."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
