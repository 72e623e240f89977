"""From what a text must match to a grammar in llguidance's JSON form, refusing at sight what it would misread.

Knows JSON schema only as far as that needs: how deep it is nested, and whether its patterns can be patterns. All else
is the grammar compiler's to judge. Imports nothing but json: a request costs no library until it has a grammar.
"""

from __future__ import annotations

import json
import re
from typing import Any

from engine.sampling_params import StructuredOutput

MAX_DEPTH = 256  # levels of objects and arrays in a schema: twice what 128 nested objects take
MAX_BLANKS = 20  # in a row, between the tokens of a JSON text

# without a bound, a small model at a high temperature goes on in blanks until its tokens are spent
WHITESPACE = rf"[\x20\x0A\x0D\x09]{{1,{MAX_BLANKS}}}"

_OBJECT = {"type": "object"}
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(?:,\d*)?\}")
_ESCAPE = re.compile(r"\\.", re.DOTALL)
_ASCII = {r"\d": "0-9", r"\w": "0-9A-Za-z_", r"\s": r"\t\n\v\f\r "}
_NOT_ASCII = {
    r"\D": r"\x00-\x2F\x3A-\x{10FFFF}",
    r"\W": r"\x00-\x2F\x3A-\x40\x5B-\x5E\x60\x7B-\x{10FFFF}",
    r"\S": r"\x00-\x08\x0E-\x1F\x21-\x{10FFFF}",
}
_IN_CLASS = {**_ASCII, **_NOT_ASCII}
_SPELLED = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
# an escape, a class of characters (to its end or to the end of all), the head of a group, or a character
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]?|\(\??|.", re.DOTALL)


def to_llguidance(structured: StructuredOutput) -> str:
    """The grammar as llguidance reads it. Raises ValueError with a sentence about the source."""
    if structured.kind == "lark":
        return _grammar(structured.source)
    term, more = _form(structured)
    if not structured.calls:
        return _grammar(f"start: {term}{more}")
    calls = structured.calls.removeprefix("start:")
    return _grammar(f"start: answer | calls\nanswer: {term}{more}\ncalls:{calls}")


def _form(structured: StructuredOutput) -> tuple[str, str]:
    """(a term, further lines that it needs)."""
    match structured.kind:
        case "json":
            return _schema(structured.source), ""
        case "regex":
            _check_pattern(structured.source)
            return f"/{_slashed(structured.source)}/", ""
        case "choice":
            choices = dict.fromkeys(json.loads(structured.source))
            spelled = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
            return "CHOICE", f"\nCHOICE: {spelled}"  # one lexeme, however many they are
        case _:
            return _json_term(_OBJECT), ""


def _grammar(lark: str) -> str:
    """no_forcing: where only one text can follow, the model may still choose its tokens, as it is used to."""
    return json.dumps({"grammars": [{"lark_grammar": f'{lark}\n%llguidance {{"no_forcing": true}}'}]})


def _json_term(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps(_bounded(schema))


def _schema(source: str) -> str:
    try:
        schema = json.loads(source)
    except (ValueError, RecursionError):
        raise ValueError("The schema is not valid JSON.") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise ValueError("The schema must be an object.")
    _check_schema(schema)
    return _json_term(schema)


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema's own options for the compiler stay, but for white space."""
    options = schema.get("x-guidance")
    options = dict(options) if isinstance(options, dict) else {}
    if options.get("whitespace_flexible") is not False:
        options["whitespace_pattern"] = WHITESPACE
    return {**schema, "x-guidance": options}


def _check_schema(schema: dict[str, Any]) -> None:
    """Level by level, so that no depth can exhaust a stack."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                if isinstance(pattern := node.get("pattern"), str):
                    _check_pattern(pattern)
                if isinstance(patterns := node.get("patternProperties"), dict):
                    for pattern in patterns:
                        _check_pattern(pattern)
                below += node.values()
            elif isinstance(node, list):
                below += node
        if not below:
            return
        level = below
    raise ValueError(f"The schema is nested more than {MAX_DEPTH} levels deep.")


def _check_pattern(pattern: str) -> None:
    """The compiler drops anchors first, and would then take a quantifier with nothing before it for a character."""
    at_start, place = True, 0
    while found := _PIECE.match(pattern, place):
        if at_start and _QUANTIFIER.match(pattern, place):
            raise ValueError(f"The pattern {_short(pattern)} has a quantifier with nothing to repeat.")
        if found[0] == "\\":
            raise ValueError(f"The pattern {_short(pattern)} ends with a lone backslash.")
        at_start = found[0] in ("(", "(?", "|", "^")
        place = found.end()


def _slashed(pattern: str) -> str:
    r"""As the body of a /.../ term: slashes escaped, line breaks spelled, \d, \w and \s of ASCII alone: who asks for a
    digit wants to read it as one."""
    return "".join(_slashed_piece(piece) for piece in _PIECE.findall(pattern))


def _slashed_piece(piece: str) -> str:
    if piece.startswith("["):
        piece = _ESCAPE.sub(lambda found: _IN_CLASS.get(found[0], found[0]), piece)
    elif piece in _ASCII:
        piece = f"[{_ASCII[piece]}]"
    elif piece.lower() in _ASCII:
        piece = f"[^{_ASCII[piece.lower()]}]"
    piece = _ESCAPE.sub(lambda found: _SPELLED.get(found[0][1], found[0]), piece)
    return re.sub(r"(\\.)|[/\n\r]", lambda found: found[1] or _SPELLED[found[0]], piece)


def _short(pattern: str) -> str:
    text = json.dumps(pattern, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
