"""Where in a JSON schema some keywords stand, for the person who wrote it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

MAX_NODES = 20_000  # that are looked at
MAX_CHARS = 100  # of a place that is told

_BY_NAME = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_SCHEMAS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_SCHEMA = frozenset((
    "additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then",
    "unevaluatedItems", "unevaluatedProperties",
))  # fmt: skip
_NAME = re.compile(r"[\w$-]+")


def place_of(schema: object, keywords: Collection[str]) -> str | None:
    """The outermost schema within `schema` that has all of `keywords`, as "properties.tags.items"; "" is the schema
    itself. None if there is none, or none whose place is short enough to tell."""
    level: list[tuple[str, object]] = [("", schema)]
    num_seen = 0
    while level and num_seen <= MAX_NODES:
        num_seen += len(level)
        for place, node in level:
            if isinstance(node, dict) and keywords and all(keyword in node for keyword in keywords):
                return place
        below = (each for place, node in level if isinstance(node, dict) for each in _below(place, node))
        level = [(place, node) for place, node in below if len(place) <= MAX_CHARS]
    return None


def _below(place: str, node: dict[str, Any]) -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        at = f"{place}.{key}" if place else key
        if key in _BY_NAME and isinstance(value, dict):
            yield from ((at + _step(name), inner) for name, inner in value.items())
        elif key in _SCHEMAS and isinstance(value, list):
            yield from ((f"{at}[{index}]", inner) for index, inner in enumerate(value))
        elif key in _SCHEMA:
            yield at, value


def _step(name: str) -> str:
    return f".{name}" if _NAME.fullmatch(name) else f"[{json.dumps(name, ensure_ascii=False)}]"
