"""Where keywords stand in a schema."""

from __future__ import annotations

from typing import Any

import pytest

from engine.schema_place import MAX_CHARS, place_of

UNIQUE = {"type": "array", "uniqueItems": True}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (UNIQUE, ""),
        ({"properties": {"tags": UNIQUE}}, "properties.tags"),
        ({"properties": {"two words": UNIQUE}}, 'properties["two words"]'),
        ({"items": UNIQUE}, "items"),
        ({"anyOf": [{}, {"items": [{}, UNIQUE]}]}, "anyOf[1].items[1]"),
        ({"$defs": {"a": {"additionalProperties": UNIQUE}}}, "$defs.a.additionalProperties"),
        ({"properties": {"a": {"properties": {"b": UNIQUE}}, "c": UNIQUE}}, "properties.c"),  # the outermost
        ({"properties": {"uniqueItems": {}}}, None),  # a name is no keyword
        ({"enum": [UNIQUE], "default": UNIQUE}, None),  # nor is data
        ({"properties": {"x" * MAX_CHARS: UNIQUE}}, None),
        ({"properties": [UNIQUE], "items": 5, "allOf": {}}, None),
        (True, None),
    ],
)
def test_places(schema: Any, place: str | None) -> None:
    assert place_of(schema, ["uniqueItems"]) == place


def test_all_keywords_are_at_one_place() -> None:
    schema = {"properties": {"a": {"not": {}}, "b": {"if": {}, "not": {}}}}
    assert place_of(schema, ("if", "not")) == "properties.b"
    assert place_of(schema, ()) is None


def test_a_deep_schema_has_an_end() -> None:
    schema: dict[str, Any] = UNIQUE
    for _ in range(50_000):
        schema = {"items": schema}
    assert place_of(schema, ["uniqueItems"]) is None
