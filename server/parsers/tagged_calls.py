"""Calls in tags, values as bare text: Qwen3-Coder and Qwen3.5, GLM, MiniMax M2, Seed, DeepSeek V3.2. One parser, and
a table row per format.

The tool's schema says what a value is. A string is passed on as it comes; other values are read whole. The formats
have no escapes, so the end of a value is taken for its end only where the next tag, or nothing, follows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from server.parsers.blocks import BlockCalls
from server.parsers.json_text import escaped, skip_space
from server.parsers.schema import Tools, typed
from server.parsers.script import MAX_NAME_CHARS, Malformed, Reading, Sink, any_mark

_STRING = frozenset(("string",))
_CDATA = any_mark("<![CDATA[")
_NAME = re.compile(r'[^\n<>{"]*')


@dataclass(frozen=True)
class Tags:
    """open, close: around a block. call, name_end: around a name; the name may follow `open` at once (no `call`) and
    end at a line's end or a tag (no `name_end`). call_end: after the last argument. key, key_end: around an
    argument's name; value, value_end: around its value.

    line_breaks: one line break after the value's tag and one before its end are the format's.
    cdata: a value may be wrapped as in XML, <![CDATA[...]]>.
    told: key_end -> whether it says that the value is a string, where it says so."""

    open: str
    close: str
    call: str
    name_end: str
    call_end: str
    key: str
    key_end: str
    value: str
    value_end: str
    line_breaks: bool = False
    cdata: bool = False
    told: Mapping[str, bool] = field(default_factory=dict)

    @property
    def all(self) -> tuple[str, ...]:
        """Tags that may be special tokens."""
        return tuple(
            filter(None, (self.open, self.close, self.call, self.call_end, self.key, self.key_end, self.value_end))
        )


class TaggedCalls(BlockCalls):
    def __init__(self, tags: Tags, tools: Tools) -> None:
        super().__init__((tags.open, tags.call), (tags.close, tags.call_end))
        self._tags = tags
        self._tools = tools
        self._call = any_mark(tags.call)
        self._name_end = any_mark(tags.name_end)
        self._next = any_mark(tags.key, tags.call_end, tags.close, tags.open, tags.call)
        self._after_value = any_mark(tags.key, tags.call_end, tags.close)
        self._key_end = any_mark(tags.key_end, *tags.told)
        self._value = any_mark(tags.value)
        self._value_end = any_mark(tags.value_end)
        self._wrapped_end = any_mark("]]>" + tags.value_end)
        self._close = any_mark(tags.close, tags.open, tags.call)

    def calls(self, mark: str) -> Reading[None]:
        tags, reader = self._tags, self.reader
        if mark != tags.call and tags.call:
            yield from skip_space(reader)
            if not (yield from reader.starts(self._call)):
                raise Malformed
        last = yield from self._one_call()
        while last not in (tags.close, ""):
            if last in (tags.open, tags.call):
                reader.remember(last)
                if last == tags.open and tags.call:
                    yield from skip_space(reader)
                    if not (yield from reader.starts(self._call)):
                        raise Malformed
                last = yield from self._one_call()
                continue
            reader.remember()
            yield from skip_space(reader)
            last = (yield from reader.starts(self._close)) or ""
            if not last:
                self.out.content(reader.forget() or "")

    def _one_call(self) -> Reading[str]:
        """Gives the tag it ended with; "" at the text's end."""
        tags, reader = self._tags, self.reader
        name = (yield from reader.word(_NAME, MAX_NAME_CHARS)).strip()
        if tags.name_end:
            if not (yield from reader.starts(self._name_end)):
                raise Malformed
            self.begin(name)
        if tags.name_end and (yield from skip_space(reader)) == "{":  # JSON where tags should be
            yield from self.pass_arguments()
            return (yield from self._next_tag())
        mark = yield from self._next_tag()
        if not tags.name_end:
            if not mark:
                raise Malformed
            self.begin(name)
        return (yield from self._arguments(name, mark))

    def _arguments(self, name: str, mark: str) -> Reading[str]:
        """From the first tag to the one after the last argument."""
        separator = "{"
        while mark == self._tags.key:
            try:
                mark = yield from self._argument(name, separator)
            except Malformed:
                self.out.arguments("" if self.reader.ended else "{}" if separator == "{" else "}")
                raise
            separator = ", "
        if mark:
            self.out.arguments("{}" if separator == "{" else "}")
        return mark

    def _next_tag(self) -> Reading[str]:
        """The next tag of a call; before the call has begun nothing but blanks may come before it, later on whatever
        stands there is dropped."""
        yield from skip_space(self.reader)
        found = yield from self.reader.starts(self._next)
        if found is None and self._tags.name_end:
            found = yield from self.reader.until(self._next)
        return found or ""

    def _argument(self, name: str, separator: str) -> Reading[str]:
        """One argument; gives the tag after it."""
        reader, tags = self.reader, self._tags
        key, end = yield from reader.text_until(self._key_end)
        key = key.strip().strip('"')
        if tags.value:
            yield from skip_space(reader)
            if not (yield from reader.starts(self._value)):
                raise Malformed
        types = self._tools.types(name, key)
        if end in tags.told:
            types = _STRING if tags.told[end] else types - _STRING or types
        self.out.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if types == _STRING:
            self.out.arguments('"')
            value = _Value(lambda text: self.out.arguments(escaped(text)), tags.line_breaks)
            ended = yield from self._pass_value(value)
            if ended:
                self.out.arguments('"')
        else:
            pieces: list[str] = []
            ended = yield from self._pass_value(_Value(pieces.append, tags.line_breaks))
            self.out.arguments(typed("".join(pieces), types) if ended else "")
        return (yield from self._next_tag()) if ended else ""

    def _pass_value(self, value: _Value) -> Reading[bool]:
        """False: the text ended first."""
        is_wrapped = self._tags.cdata and (yield from self.reader.starts(_CDATA)) is not None
        value_end = self._wrapped_end if is_wrapped else self._value_end
        while mark := (yield from self.reader.until(value_end, value)):
            if (yield from self.reader.is_followed_by(self._after_value)):
                return True
            value(mark)
        return False


class _Value:
    """A sink that takes the format's line breaks off a value's ends: the last one is held until more comes."""

    def __init__(self, sink: Sink, line_breaks: bool) -> None:
        self._sink = sink
        self._line_breaks = line_breaks
        self._is_first = True
        self._held = ""

    def __call__(self, text: str) -> None:
        if not self._line_breaks:
            self._sink(text)
            return
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        if text := text.removesuffix("\n"):
            self._sink(text)
