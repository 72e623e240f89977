"""A regular expression for texts as they stand inside a JSON string.

Each character that JSON escapes is spelled in one way, the usual one; all others stand for themselves. So quoting maps
characters one to one, whatever the pattern means, and a text matches the pattern just when its quoted form matches the
quoted one. Rust's syntax, as the grammar compiler reads it; a pattern that it would refuse comes out as one that it
refuses as well.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable
from functools import reduce

_Set = frozenset[str]

ESCAPES = {char: json.dumps(char)[1:-1] for char in [*map(chr, range(0x20)), '"', "\\"]}
_ALL: _Set = frozenset(ESCAPES)
_NONE: _Set = frozenset()
_LONG = frozenset(char for char in _ALL if len(ESCAPES[char]) > 2)
_LONG_PATTERN = "u00(?:0[0-7be-f]|1[0-9a-f])"
_BLANKS: _Set = frozenset("\t\n\v\f\r")
_PERL = {"d": _NONE, "w": _NONE, "s": _BLANKS}
_MARKS: _Set = frozenset('"\\')
# the others have none of these characters
_POSIX = {
    "ascii": _ALL,
    "blank": frozenset("\t"),
    "cntrl": _ALL - _MARKS,
    "graph": _MARKS,
    "print": _MARKS,
    "punct": _MARKS,
    "space": _BLANKS,
}
_CHARACTERS = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_CODE = re.compile(r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,8})\}")
_CATEGORY = re.compile(r"[pP](?:\{(\w+)\}|(\w))")
_GROUP = re.compile(r"\((?:\?P?<[^>]{0,100}>|\?([a-zA-Z]*)(-[a-zA-Z]*)?([:)])|)")
_POSIX_CLASS = re.compile(r"\[:(\^?)([a-z]+):\]")
_OPERATOR = re.compile(r"&&|--|~~")
MAX_NESTED = 32  # classes in classes


class Unquotable(ValueError):
    """A pattern or a grammar has something that cannot be told of a quoted text. The message goes on after "it"."""


def quoted(pattern: str, flags: str = "") -> str:
    """flags: of the whole pattern, as in /.../is. Raises Unquotable."""
    _check_flags(flags)
    try:
        return _Quoting(pattern, dot_all="s" in flags).run()
    except (IndexError, OverflowError, ValueError) as error:
        if isinstance(error, Unquotable):
            raise
        return pattern  # it is malformed, and whoever compiles it says so


def spelled(chars: Iterable[str]) -> str:
    """Any of `chars`, all of which JSON escapes, as it is escaped; one item of a pattern, whatever its flags."""
    chars = frozenset(chars)
    short = "".join(sorted(ESCAPES[char][1] for char in chars - _LONG)).replace("\\", r"\\")
    options = [f"[{short}]"] if short else []
    if chars >= _LONG:
        options.append(_LONG_PATTERN)
    else:
        options += sorted(ESCAPES[char][1:] for char in chars & _LONG)
    return rf"(?-i:\\(?:{'|'.join(options)}))"


def _check_flags(flags: str) -> None:
    for flag in flags:
        if flag not in "imsuU":
            raise Unquotable(f"has a pattern with the flag {flag}")


class _Quoting:
    """One pass over a pattern."""

    def __init__(self, pattern: str, *, dot_all: bool) -> None:
        self._pattern = pattern
        self._at = 0
        self._dot_all = [dot_all]  # of the groups that are open

    def run(self) -> str:
        pieces = []
        while self._at < len(self._pattern):
            pieces.append(self._piece())
        return "".join(pieces)

    def _piece(self) -> str:
        start, char = self._at, self._pattern[self._at]
        if char == "[":
            return self._class_of(self._members(), start)
        if char == "\\":
            members = self._escape()
            return self._class_of(members, start) if not isinstance(members, str) else self._literal(members, start)
        self._at += 1
        if char == "(":
            return self._group(start)
        if char == ")":
            self._dot_all.pop()
            return char
        if char == ".":
            return self._class("[^\\n]" if not self._dot_all[-1] else "[\\s\\S]", self._dot())
        return self._literal(char, start)

    def _dot(self) -> _Set:
        return _ALL if self._dot_all[-1] else _ALL - {"\n"}

    def _group(self, start: int) -> str:
        found = _GROUP.match(self._pattern, start)
        assert found is not None
        self._at = found.end()
        on, off = found[1] or "", (found[2] or "")[1:]
        _check_flags(on + off.replace("u", "-"))
        dot_all = "s" in on or (self._dot_all[-1] and "s" not in off)
        if found[3] == ")":  # for the rest of the group that is open
            self._dot_all[-1] = dot_all
        else:
            self._dot_all.append(dot_all)
        return found[0]

    def _literal(self, char: str, start: int) -> str:
        return spelled(char) if char in _ALL else self._pattern[start : self._at]

    def _class_of(self, members: _Set, start: int) -> str:
        return self._class(self._pattern[start : self._at], members)

    @staticmethod
    def _class(text: str, members: _Set) -> str:
        return rf'(?:[{text}&&[^"\\\x00-\x1F]]|{spelled(members)})' if members else text

    def _escape(self) -> str | _Set:
        """A character, or the members of a class; an anchor is the empty set."""
        char = self._pattern[self._at + 1]
        self._at += 2
        if char in _CHARACTERS:
            return _CHARACTERS[char]
        if char.lower() in _PERL:
            members = _PERL[char.lower()]
            return members if char.islower() else _ALL - members
        if found := _CODE.match(self._pattern, self._at - 1):
            self._at = found.end()
            return chr(int(next(filter(None, found.groups())), 16))
        if found := _CATEGORY.match(self._pattern, self._at - 1):
            self._at = found.end()
            members = _of_category(found[1] or found[2])
            return members if char == "p" else _ALL - members
        return _NONE if char.isalnum() or char in "<>" else char

    def _members(self, depth: int = 0) -> _Set:
        """Of the class that begins here, among the characters that JSON escapes."""
        if depth > MAX_NESTED:
            raise Unquotable("has a class of characters within too many others")
        if depth and (found := _POSIX_CLASS.match(self._pattern, self._at)):
            self._at = found.end()
            members = _POSIX.get(found[2], _NONE)
            return _ALL - members if found[1] else members
        self._at += 1
        if negated := self._pattern[self._at] == "^":
            self._at += 1
        terms: list[tuple[str, set[str]]] = [("", set())]
        first = True  # a bracket here is a character
        while self._pattern[self._at] != "]" or first:
            if not first and (found := _OPERATOR.match(self._pattern, self._at)):
                self._at = found.end()
                terms.append((found[0], set()))
                continue
            terms[-1][1].update(self._item(depth))
            first = False
        self._at += 1
        members = reduce(_combined, terms[1:], frozenset(terms[0][1]))
        return _ALL - members if negated else members

    def _item(self, depth: int) -> _Set:
        if self._pattern[self._at] == "[":
            return self._members(depth + 1)
        first = self._one()
        if not isinstance(first, str):
            return first
        following = self._pattern[self._at : self._at + 2]
        if following[:1] != "-" or following[1:] in ("]", "-"):
            return _ALL & {first}
        self._at += 1
        last = self._one()
        if not isinstance(last, str):
            raise IndexError
        return frozenset(char for char in _ALL if first <= char <= last)

    def _one(self) -> str | _Set:
        if self._pattern[self._at] == "\\":
            return self._escape()
        self._at += 1
        return self._pattern[self._at - 1]


def _combined(before: _Set, term: tuple[str, set[str]]) -> _Set:
    operator, members = term
    if operator == "&&":
        return before & members
    return before - members if operator == "--" else before ^ members


def _of_category(name: str) -> _Set:
    """By the short names of general categories: those of scripts and properties are many."""
    if not re.fullmatch(r"[CLMNPSZ]|[CLMNPSZ][a-z]", name):
        raise Unquotable(f"has a pattern with the class {name}")
    return frozenset(char for char in _ALL if unicodedata.category(char).startswith(name))
