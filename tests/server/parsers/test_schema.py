from __future__ import annotations

import json
from typing import Any

import pytest

from server.parsers.schema import Tools, typed
from tests.server.parsers.cuts import tool

ANY = Tools([]).types("f", "a")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("5", {"type": "string"}, "5"),
        (' "x" ', {"type": "string"}, ' "x" '),
        ("5", {"type": "integer"}, 5),
        ("5.0", {"type": "integer"}, 5),
        ("5.5", {"type": "integer"}, "5.5"),
        ("5", {"type": "number"}, 5),
        ("1e3", {"type": "number"}, 1000.0),
        ("NaN", {"type": "number"}, "NaN"),
        ("1e999", {"type": "number"}, "1e999"),
        ('["\\ud800", 1]', {"type": "array"}, ["\ufffd", 1]),
        ('{"a": 1e999}', {"type": "object"}, '{"a": 1e999}'),
        ("9" * 6000, {"type": "integer"}, "9" * 6000),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("{'a': True}", {"type": "object"}, {"a": True}),
        ("{'a': {1}}", {"type": "object"}, "{'a': {1}}"),
        ("(1, 2)", {"type": "array"}, [1, 2]),
        ('{"a"', {"type": "object"}, '{"a"'),
        ("[" * 20_000, {"type": "array"}, "[" * 20_000),
        ("", {"type": "integer"}, ""),
        ("x", {"type": "integer"}, "x"),
        ("7", {"enum": [7, 8]}, 7),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"const": 7}, 7),
        ("7", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 7),
        ("x", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "x"),
        ("7", {"$ref": "#/$defs/n"}, 7),
        ("7", {"$ref": "#/$defs/loop"}, 7),
        ("[1]", {}, [1]),
        ("words", {}, "words"),
    ],
)
def test_values_follow_the_schema(text: str, schema: dict[str, Any], value: Any) -> None:
    made = tool("f", a=schema)
    made["function"]["parameters"]["$defs"] = {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}}
    assert json.loads(typed(text, Tools([made]).types("f", "a"))) == value


@pytest.mark.parametrize("parameters", [None, {}, [], {"properties": []}, {"properties": {"a": True}}, "x"])
def test_a_schema_that_says_nothing(parameters: Any) -> None:
    tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert tools.types("f", "a") == ANY
    assert tools.types("other", "a") == ANY
