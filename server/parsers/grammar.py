"""Pieces of Lark grammars in llguidance's dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from engine.tokenizer import Tokenizer

# as models were trained to write JSON; and bounded, so that none can go on in blanks for ever
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
# keywords that the compiler refuses, with the values that say nothing
_SAYS_NOTHING: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "propertyNames": ({}, True, {"type": "string"}),
    "unevaluatedItems": ({}, True),
    "unevaluatedProperties": ({}, True),
    "uniqueItems": (False,),
}
_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_DATA = frozenset(("const", "enum", "default", "example", "examples", "required", "x-guidance"))


def literal(text: str) -> str:
    """`text` as a term."""
    return json.dumps(text, ensure_ascii=False)


def one_of(texts: Iterable[str]) -> str:
    """Any of `texts`, for a terminal: a name in capitals. As terms of a rule, many would be followed one by one."""
    return " | ".join(map(literal, dict.fromkeys(texts)))


def enforceable(schema: Any) -> Any:
    """The schema without what the compiler refuses though it narrows nothing: formats of strings that are not known
    (they are annotations, and generators of schemas write many, "uint64"), and the likes of "uniqueItems": false."""
    if isinstance(schema, list):
        return [enforceable(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if any(value == nothing and type(value) is type(nothing) for nothing in _SAYS_NOTHING.get(key, ())):
            continue
        if key in _BY_NAME and isinstance(value, dict):
            kept[key] = {name: enforceable(each) for name, each in value.items()}
        elif key in _DATA:
            kept[key] = value
        elif key != "format" or not isinstance(value, str) or value in _FORMATS:
            kept[key] = enforceable(value)
    return kept


def json_term(schema: Mapping[str, Any]) -> str:
    """A JSON value of `schema` as a term. The schema's own options for the compiler stay, but for white space."""
    options = schema.get("x-guidance")
    options = options if isinstance(options, dict) else {}
    kept = {key: value for key, value in options.items() if key != "whitespace_pattern"}
    return "%json " + json.dumps({**enforceable(schema), "x-guidance": kept | JSON_STYLE})


class Spelling:
    """How a format's texts are written in a grammar: marks that are special tokens by their ids, since no text can
    spell those; all else as text."""

    def __init__(self, marks: Iterable[str], tokenizer: Tokenizer | None) -> None:
        ids = {mark: tokenizer.token_id(mark) for mark in filter(None, marks)} if tokenizer else {}
        self._special = {
            mark: token_id
            for mark, token_id in ids.items()
            if token_id is not None and tokenizer is not None and tokenizer.is_special(token_id)
        }
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def term(self, text: str) -> str:
        """A sequence of terms; empty for no text."""
        terms: list[str] = []
        at = 0
        for match in self._pattern.finditer(text):
            if match.start() > at:
                terms.append(literal(text[at : match.start()]))
            terms.append(f"<[{self._special[match[0]]}]>")
            at = match.end()
        if at < len(text):
            terms.append(literal(text[at:]))
        return " ".join(terms)

    def has_special(self, text: str) -> bool:
        return self._pattern.search(text) is not None
