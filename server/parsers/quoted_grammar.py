"""A Lark grammar for texts as they stand inside a JSON string, in llguidance's dialect.

Its strings and patterns are quoted (`quoted_pattern.py`), all else means the same. But the compiler's lexer looks one
byte ahead, and an escape has two: where one terminal could go on with an escape, no other one that begins with an
escape would ever be found. So rules that do not refer to themselves become one terminal, whose parts need no lexer.
Those that do stay rules, as long as there can be no such pair of terminals. What a grammar ignores is no such terminal
where it is ignored one by one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from server.parsers.quoted_pattern import ESCAPES, Unquotable, quoted, spelled

MAX_CHARS = 128 << 10

_TOKEN = re.compile(
    r"""(?P<newline>\r?\n)|(?P<blank>(?://|\#)[^\n]*|[ \t\r]+)"""
    r"""|(?P<range>"(?:\\.|[^"\\\n])*"[ \t]*\.\.[ \t]*"(?:\\.|[^"\\\n])*")"""
    r"""|(?P<string>"(?:\\.|[^"\\\n])*"i?)"""
    r"""|(?P<pattern>/(?:\\.|[^/\\])+/[imslux]*)"""
    r"""|(?P<import>%import[ \t]+common[ \t]*(?:\.[ \t]*\w+[ \t]*(?:->[ \t]*\w+)?|\([\w,\s]*\)))"""
    r"""|(?P<directive>%(?:json|regex|llguidance)\b)"""
    r"""|(?P<special><[^<>\s]+>)"""
    r"""|(?P<alias>->[ \t]*\w+)"""
    r"""|(?P<rule>[!?]{0,2}_?[a-z][_a-z0-9\-]*)"""
    r"""|(?P<terminal>_?[A-Z][_A-Z0-9\-]*)"""
    r"""|(?P<other>%\w+|.)""",
    re.DOTALL,
)
_BLANKS = re.compile(r"\s*")
_END = r"[ \t]*(?:(?://|#)[^\n]*)?(?:\r?\n|\Z)"
_LINE_END = re.compile(_END)
_CHARS = re.compile(r"/(\[\^?(?:\\.|[^\[\]\\])+\]|\\s)\+?/")
_IGNORED = re.compile(rf"%ignore[ \t]+(\w+)(?={_END})")
_NAMES = re.compile(r"(\w+)[ \t]*(?:->[ \t]*(\w+))?")
_HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_META = re.compile(r"[\\.+*?()|\[\]{}^$/]")
_TEXTS = frozenset(("string", "range", "pattern", "terminal"))
# what a terminal cannot have, or would not mean the same in
_RULES_ONLY = frozenset(("%if", "%lark", "@", "="))
# terminals that grammars import, as far as they have characters that JSON escapes
_COMMON = {
    "ESCAPED_STRING": r'"([^"\\]|\\.)*"',
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*([^*]|\*+[^*\/])*\*+\/",
    "SQL_COMMENT": r"--[^\n]*",
}


@dataclass(slots=True)
class _Token:
    kind: str
    text: str
    is_quoted: bool = False  # it has escapes


def quoted_grammar(source: str) -> str:
    """The grammar of the quoted texts of `source`; one that cannot be read comes out as one that cannot either.
    Raises Unquotable."""
    if len(source) > MAX_CHARS:
        raise Unquotable(f"has more than {MAX_CHARS} characters")
    tokens = list(_tokens(source))
    found = _One(tokens)
    if found.is_plain:
        return found.text()
    if _may_collide(tokens):
        raise Unquotable("has rules that refer to themselves, and terminals with line breaks, quotes or backslashes")
    return "".join(token.text for token in tokens)


def _tokens(source: str) -> Iterator[_Token]:
    at, before = 0, ""
    ignored = frozenset(_IGNORED.findall(source))
    while found := _TOKEN.match(source, at):
        at, kind, text = found.end(), str(found.lastgroup), found[0]
        if before == "%ignore" and _LINE_END.match(source, at) and (char := _ignored_char(text)) is not None:
            yield _Token("pattern", f"/{quoted(char)}/")
        elif kind == "special":
            raise Unquotable(f"names the special token {text}, which is no text")
        elif kind == "directive":
            value, at = _value(source, at)
            if text == "%json" or (text == "%regex" and "\\" in value):
                raise Unquotable(f"has a {text}" + " with escaped characters" * (text == "%regex"))
            yield _Token("options" if text == "%llguidance" else "terminal", text + value)
        elif kind == "import":
            yield from _imported(text, ignored)
        elif kind in _QUOTING:
            made = _QUOTING[kind](text)
            yield _Token(kind, made, made != text)
        elif kind != "blank":
            yield _Token(kind, text)
        else:
            yield _Token(kind, " ")
        before = text if kind != "blank" else before


# -- terminals ----------------------------------------------------------------------------------------------------


def _text(string: str) -> str:
    """What a string says. Raises ValueError."""
    return str(json.loads(_HEX.sub(lambda found: f"\\u00{found[1]}" if found[1] else found[0], string)))


def _string(string: str) -> str:
    inner = string.removesuffix("i")
    try:
        text = _text(inner)
    except ValueError:
        return string
    if not ESCAPES.keys() & set(text):
        return string
    if inner != string:  # the letters of an escape have one case
        return f"/{''.join(map(_without_case, text))}/"
    return json.dumps("".join(ESCAPES.get(char, char) for char in text), ensure_ascii=False).replace("\x7f", r"\u007f")


def _without_case(char: str) -> str:
    return spelled(char) if char in ESCAPES else f"(?i:{_META.sub(lambda found: chr(92) + found[0], char)})"


def _ignored_char(text: str) -> str | None:
    """The pattern of one character, where the grammar ignores such characters one after the other; None elsewhere."""
    found = _CHARS.fullmatch(text) or _CHARS.fullmatch(f"/{_COMMON.get(text)}/")
    return found[1] if found else None


def _range(text: str) -> str:
    start, end = re.findall(r'"(?:\\.|[^"\\\n])*"', text)
    try:
        first, last = _text(start), _text(end)
    except ValueError:
        return text
    if len(first) != 1 or len(last) != 1 or not any(first <= char <= last for char in ESCAPES):
        return text
    between = f"[{_code(first)}-{_code(last)}]"
    return f"/{quoted(between)}/"


def _code(char: str) -> str:
    return rf"\x{{{ord(char):X}}}"


def _pattern(text: str) -> str:
    inner, _, flags = text[1:].rpartition("/")
    return f"/{quoted(inner, flags)}/{flags}"


_QUOTING = {"string": _string, "range": _range, "pattern": _pattern}


def _imported(text: str, ignored: Collection[str]) -> Iterator[_Token]:
    """The terminals' definitions, a line each; imports of those that need none stay. ignored: names of terminals."""
    for name, alias in _NAMES.findall(text.partition("common")[2]):
        if name in _COMMON:
            counts = name not in ignored or _ignored_char(name) is None
            yield _Token("definition", f"{alias or name}: /{quoted(_COMMON[name])}/", counts)
        else:
            yield _Token("definition", f"%import common.{name}" + (f" -> {alias}" if alias else ""))
        yield _Token("newline", "\n")


def _value(source: str, at: int) -> tuple[str, int]:
    """(the JSON behind a directive, where it ends); empty if there is none."""
    blanks = _BLANKS.match(source, at)
    assert blanks is not None
    start = blanks.end()
    try:
        _, end = json.JSONDecoder().raw_decode(source, start)
    except (ValueError, RecursionError):
        return "", at
    return source[at:end], end


# -- rules --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Definition:
    """is_rule: between its parts there may be what the grammar ignores."""

    name: str
    is_rule: bool
    body: list[_Token] = field(default_factory=list)


class _One:
    """A grammar as one terminal. is_plain: it can be one."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._definitions: list[_Definition] = []
        self._ignored: list[list[_Token]] = []
        self._others: list[str] = []
        self.is_plain = self._read(tokens) and self._ends()

    def _read(self, tokens: list[_Token]) -> bool:
        """False for what is no plain grammar, or none at all."""
        body: list[_Token] | None = None
        for line in _lines(tokens):
            first = line[0]
            if any(token.text in _RULES_ONLY for token in line):
                return False
            if first.kind in ("options", "definition"):
                self._others += [first.text] if first.kind == "definition" else []
                continue
            if first.text == "|" and body is not None:
                body += line
                continue
            if first.text == "%ignore":
                body = line[1:]
                self._ignored.append(body)
            elif first.kind in ("rule", "terminal") and len(line) > 1 and line[1].text == ":":
                body = line[2:]
                if any(token.text == ":" for token in body):
                    return False
                self._definitions.append(_Definition(first.text.lstrip("!?"), first.kind == "rule", body))
            else:
                return False
        return any(each.name == "start" for each in self._definitions)

    def _ends(self) -> bool:
        """Whether no rule refers to itself."""
        graph = {each.name: {token.text for token in each.body if token.kind == "rule"} for each in self._definitions}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError:
            return False
        return True

    def text(self) -> str:
        names = {each.name: f"RULE-{i}" for i, each in enumerate(self._definitions) if each.is_rule}
        lines = [f"start: {names['start']}", *self._others]
        if self._ignored:
            lines.append("IGNORED-0: " + " | ".join(_joined(body, {}, "") for body in self._ignored))
        for each in self._definitions:
            ignored = " IGNORED-0*" if self._ignored and each.is_rule else ""
            lines.append(f"{names.get(each.name, each.name)}: {_joined(each.body, names, ignored)}")
        return "\n".join(lines)


def _lines(tokens: list[_Token]) -> Iterator[list[_Token]]:
    line: list[_Token] = []
    for token in [*tokens, _Token("newline", "\n")]:
        if token.kind == "newline":
            if line:
                yield line
            line = []
        elif token.kind not in ("blank", "alias"):
            line.append(token)


def _joined(body: list[_Token], names: dict[str, str], ignored: str) -> str:
    pieces = []
    for token in body:
        if token.kind in _TEXTS and ignored:
            pieces.append(f"({token.text}{ignored})")
        elif token.kind == "rule":
            pieces.append(names.get(token.text, token.text))
        else:
            pieces.append(token.text)
    return " ".join(pieces)


def _may_collide(tokens: list[_Token]) -> bool:
    """Whether one terminal could go on with an escape where another begins with one. Strings in rules end by
    themselves; a single terminal has no other."""
    in_terminal = False
    strings, others = 0, 0
    for line in _lines(tokens):
        if line[0].text != "|":
            in_terminal = line[0].kind != "rule"
        for token in line:
            if token.is_quoted:
                strings += token.kind == "string" and not in_terminal
                others += token.kind != "string" or in_terminal
    return others > 1 or (others == 1 and strings > 0)
