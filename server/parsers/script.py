"""Parsers written as if the whole text were there.

A parser's `script` is a generator that reads with the steps of `Reader` and says what it found to `Output`; a step
that needs more text yields until there is some. So where the text is cut changes when parts come, never which. Each
character is looked at a bounded number of times: what a step has read is gone from the buffer, and what a step may
look ahead is bounded.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Iterable
from functools import lru_cache
from typing import TypeVar

from server.parsers.balance import Balance
from server.parsers.base import CallArguments, CallBegin, Content, Part, Reasoning

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], object]

SPACE = re.compile(r"\s*")
MAX_NAME_CHARS = 256  # of a call's or an argument's name; more is no name
MAX_LOOKAHEAD_SPACE = 64
MAX_DEPTH = 64  # of nested values that are read by recursion


class Malformed(Exception):
    """The text is not what the format has here, or it ended."""


class Marks:
    """Texts to look for, none of which begins another."""

    def __init__(self, texts: Iterable[str]) -> None:
        self.texts = tuple(dict.fromkeys(filter(None, texts)))
        assert not any(a != b and b.startswith(a) for a in self.texts for b in self.texts)
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self._beginnings = frozenset(text[:n] for text in self.texts for n in range(len(text)))
        self._longest = max(map(len, self.texts), default=1) - 1

    def find(self, text: str, at: int) -> re.Match[str] | None:
        return self._pattern.search(text, at)

    def at(self, text: str, at: int) -> str | None:
        """The mark that begins there, if it is there whole."""
        match = self._pattern.match(text, at)
        return match[0] if match else None

    def may_begin(self, text: str, at: int) -> bool:
        """Whether all text from there on is a mark's beginning (as no text is)."""
        return len(text) - at <= self._longest and text[at:] in self._beginnings

    def certain(self, text: str, at: int) -> int:
        """Up to where no mark can have begun."""
        for start in range(max(at, len(text) - self._longest), len(text)):
            if text[start:] in self._beginnings:
                return start
        return len(text)


@lru_cache(maxsize=1024)
def any_mark(*texts: str) -> Marks:
    """The same for every parser of a format: making one takes longer than reading a short text."""
    return Marks(texts)


class Reader:
    """Text as it comes, read once. Steps are generators; at the text's end they give what there is."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._before = 0  # characters that are gone from the buffer
        self._trail: list[str] | None = None
        self._trail_start = 0  # in characters of the whole text
        self.ended = False

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._before += self._at
        self._at = 0

    @property
    def position(self) -> int:
        """Characters read so far."""
        return self._before + self._at

    @property
    def decided(self) -> int:
        """Characters of which it is certain what they are: what is remembered, or not read yet, may become a call."""
        return self.position if self._trail is None else self._trail_start

    def remember(self, text: str = "") -> None:
        """Keep what is read from now on, after `text`, which was read last, until `forget`."""
        self._trail = [text]
        self._trail_start = self.position - len(text)

    def forget(self) -> str | None:
        """What was kept, None if nothing was being kept."""
        trail, self._trail = self._trail, None
        return None if trail is None else "".join(trail)

    def take(self, count: int = 1) -> str:
        """The next characters, as many of `count` as are there."""
        return self._take_to(min(self._at + count, len(self._text)))

    def _take_to(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._trail is not None:
            self._trail.append(piece)
        return piece

    def ahead(self, count: int = 1) -> Reading[str]:
        """The next `count` characters, not taken; fewer only at the end."""
        while len(self._text) - self._at < count and not self.ended:
            yield
        return self._text[self._at : self._at + count]

    def run(self, characters: re.Pattern[str], sink: Sink | None = None) -> Reading[None]:
        """Take all that a pattern of the form [...]* matches."""
        while True:
            match = characters.match(self._text, self._at)
            if match and match.end() > self._at:
                piece = self._take_to(match.end())
                if sink:
                    sink(piece)
            if self._at < len(self._text) or self.ended:
                return
            yield

    def word(self, characters: re.Pattern[str], limit: int | None = None) -> Reading[str]:
        """As run, and the text. Raises Malformed past `limit` characters."""
        kept = _Kept(limit)
        yield from self.run(characters, kept)
        return kept.text()

    def starts(self, marks: Marks) -> Reading[str | None]:
        """Take the mark that the text begins with here; None if there is none."""
        while True:
            if found := marks.at(self._text, self._at):
                return self.take(len(found))
            if self.ended or not marks.may_begin(self._text, self._at):
                return None
            yield

    def until(self, marks: Marks, sink: Sink | None = None) -> Reading[str | None]:
        """Take the text before the next mark, then the mark. None: the text ended."""
        while True:
            match = marks.find(self._text, self._at)
            end = match.start() if match else len(self._text) if self.ended else marks.certain(self._text, self._at)
            if end > self._at:
                piece = self._take_to(end)
                if sink:
                    sink(piece)
            if match:
                return self._take_to(match.end())
            if self.ended:
                return None
            yield

    def text_until(self, marks: Marks, limit: int = MAX_NAME_CHARS) -> Reading[tuple[str, str]]:
        """(text before the next mark, mark). Raises Malformed past `limit` characters and at the end."""
        kept = _Kept(limit)
        mark = yield from self.until(marks, kept)
        if mark is None:
            raise Malformed
        return kept.text(), mark

    def is_followed_by(self, marks: Marks) -> Reading[bool]:
        """Whether a mark or the end comes next, after blanks; nothing is taken. Many blanks count as yes."""
        while True:
            match = SPACE.match(self._text, self._at, self._at + MAX_LOOKAHEAD_SPACE)
            at = match.end() if match else self._at
            if marks.at(self._text, at) or at - self._at >= MAX_LOOKAHEAD_SPACE:
                return True
            if self.ended and at == len(self._text):
                return True
            if self.ended or not marks.may_begin(self._text, at):
                return False
            yield


class _Kept:
    """A sink that keeps what it gets."""

    def __init__(self, limit: int | None) -> None:
        self._pieces: list[str] = []
        self._left = limit

    def __call__(self, text: str) -> None:
        self._pieces.append(text)
        if self._left is not None:
            self._left -= len(text)
            if self._left < 0:
                raise Malformed

    def text(self) -> str:
        return "".join(self._pieces)


class Output:
    """Parts in the order they are said, neighbours of one kind joined.

    Blanks around calls are the format's, not the reader's: those before a call are dropped, those after one are kept
    only between words. Text without calls stays as it is.

    on_content: told every text that is said to be content, as it was read, blanks and all."""

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._parts: list[Part] = []
        self._kind: type[Content] | type[Reasoning] | type[CallArguments] | None = None
        self._pieces: list[str] = []  # of the part that is still growing
        self._blanks: list[str] = []
        self._has_words = False
        self._ids: set[str] = set()
        self._balance = Balance()  # of the call begun last
        self.num_calls = 0
        self.on_content: Sink | None = None

    def content(self, text: str) -> None:
        if self.on_content is not None:
            self.on_content(text)
        if self.num_calls and not self._has_words:
            self._blanks.clear()
            text = text.lstrip()
        words = text.rstrip()
        if words:
            self._has_words = True
            self._grow(Content, "".join(self._blanks) + words)
            self._blanks.clear()
        if len(words) < len(text):
            self._blanks.append(text[len(words) :])

    def reasoning(self, text: str) -> None:
        self._grow(Reasoning, text)

    def begin(self, name: str, own_id: str | None = None) -> None:
        """The next call. own_id: the model's, used unless it had it before."""
        self._blanks.clear()
        call_id = own_id if own_id and own_id not in self._ids else self._new_id()
        self._ids.add(call_id)
        self._flush()
        self._parts.append(CallBegin(self.num_calls, call_id, name))
        self._balance = Balance()
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """More of the call begun last."""
        self._grow(CallArguments, text)

    def end(self) -> None:
        if self._blanks and not self.num_calls:
            self._grow(Content, "".join(self._blanks))
        self._blanks.clear()

    def take(self) -> list[Part]:
        self._flush()
        parts, self._parts = self._parts, []
        return parts

    def _grow(self, kind: type[Content] | type[Reasoning] | type[CallArguments], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        text, kind = "".join(self._pieces), self._kind
        self._pieces.clear()
        self._kind = None
        if text and kind is CallArguments:
            self._parts.append(CallArguments(self.num_calls - 1, text, self._balance.feed(text)))
        elif text and kind is not None:
            self._parts.append(kind(text))  # type: ignore[call-arg, arg-type]  # CallArguments went the other way


class Script:
    """An OutputParser run by its `script`. What a script leaves unread is content."""

    def __init__(self, new_id: Callable[[], str] | None = None) -> None:
        self.reader = Reader()
        self.out = Output(new_id or new_call_id)
        self._steps: Reading[None] | None = self._run()
        next(self._steps)

    def script(self) -> Reading[None]:
        raise NotImplementedError

    def feed(self, text: str) -> list[Part]:
        self.reader.add(text)
        self._advance()
        return self.out.take()

    def finish(self) -> list[Part]:
        self.reader.ended = True
        self._advance()
        self.out.end()
        return self.out.take()

    def _advance(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration:
                self._steps = None

    def _run(self) -> Reading[None]:
        yield  # until the first text
        try:
            yield from self.script()
        except Malformed:
            self.give_up()
        yield from self.reader.until(any_mark(), self.out.content)

    def give_up(self) -> bool:
        """What was remembered is content after all. False if nothing was remembered: the call has begun."""
        trail = self.reader.forget()
        if trail is None:
            return False
        self.out.content(trail)
        return True

    def begin(self, name: str, own_id: str | None = None) -> None:
        """The call is certain: nothing of it can become content any more."""
        if not name or name != name.strip() or len(name) > MAX_NAME_CHARS:
            raise Malformed
        self.reader.forget()
        self.out.begin(name, own_id)


class PlainParser:
    """All text is content."""

    def feed(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def finish(self) -> list[Part]:
        return []


def new_call_id() -> str:
    return "call_" + secrets.token_hex(12)


def new_short_id() -> str:
    """Nine letters and digits, as Mistral's templates demand."""
    return secrets.token_hex(5)[:9]
