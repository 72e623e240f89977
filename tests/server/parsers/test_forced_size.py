"""Grammars made from tools stay as long as the tools are, whatever the schemas; and what odd schemas become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.parsers.forced_arguments import MAX_ARGUMENTS, MAX_COPIED_CHARS
from server.parsers.schema import ALL, types_of
from tests.server.parsers.cuts import every_cut, values
from tests.server.parsers.test_forced import KIND_NAMES, WRITERS, Grammar, format_of, in_object

Schema = dict[str, Any]


def tool(name: str, schema: Schema) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def source_of(kind: str, *schemas: Schema) -> str:
    tool_format, _ = format_of(kind, special=False)
    tools = [tool(f"f{i}", schema) for i, schema in enumerate(schemas)]
    structured, _ = tool_format.forced(tools, names=[f"f{i}" for i in range(len(tools))], parallel=True)
    return structured.source


def accepts(kind: str, schema: Schema, text: str) -> bool:
    tool_format, tokenizer = format_of(kind, special=False)
    structured, _ = tool_format.forced([tool("f", schema)], names=["f"], parallel=False)
    return Grammar(structured, tokenizer).accepts(text)


def chain(length: int, properties: int, place: str = "$defs") -> Schema:
    """Properties that all need all definitions, one through the other."""
    definitions: Schema = {
        f"d{i}": {"type": "array", "items": {"$ref": f"#/{place}/d{i + 1}"}} for i in range(length - 1)
    }
    definitions[f"d{length - 1}"] = {"type": "array", "items": {"type": "integer"}}
    refs = {f"p{i}": {"$ref": f"#/{place}/d0"} for i in range(properties)}
    return {"type": "object", "properties": refs, place: definitions}


@pytest.mark.parametrize("kind", KIND_NAMES)
@pytest.mark.parametrize("place", ["$defs", "definitions"])
def test_shared_definitions_do_not_multiply(kind: str, place: str) -> None:
    schema = chain(200, MAX_ARGUMENTS, place)
    size = len(json.dumps(schema))
    assert len(source_of(kind, schema)) < 2 * size
    many = [chain(30, 30, place) for _ in range(40)]
    assert len(source_of(kind, *many)) < 2 * len(json.dumps(many)) + MAX_COPIED_CHARS + 10_000


def test_few_shared_definitions_keep_the_format() -> None:
    assert accepts("qwen3_coder", chain(3, 20), WRITERS["qwen3_coder"]([("f", {"p1": [[[1]]], "p7": []})]))
    assert not accepts("qwen3_coder", chain(3, 20), WRITERS["qwen3_coder"]([("f", {"p1": [[1]]})]))


def test_only_what_is_referred_to_is_copied() -> None:
    unused = {f"unused{i}": {"type": "string", "enum": [str(i)]} for i in range(3000)}
    schema = {
        "type": "object",
        "properties": {f"p{i}": {"$ref": "#/$defs/a~1b/items"} for i in range(50)},
        "$defs": {"a/b": {"items": {"$ref": "#/$defs/loop"}}, "loop": {"anyOf": [
            {"type": "integer"}, {"type": "array", "items": {"$ref": "#/$defs/loop"}}]}, **unused},
    }  # fmt: skip
    source = source_of("glm", schema)
    assert "unused" not in source
    assert source.count('"a/b"') == source.count('"loop"') == 50
    assert accepts("glm", schema, WRITERS["glm"]([("f", {"p3": [[1], 2]})]))
    assert not accepts("glm", schema, WRITERS["glm"]([("f", {"p3": ["a"]})]))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$ref": "#/$defs/nobody"}}},
        {"properties": {"a": {"$ref": "#/$defs"}}, "$defs": {}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "integer"}}},
        {"properties": {"a": {"$ref": "elsewhere"}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": ["x"]},
        {"properties": {"a": {"type": "string"}}, "required": [{}]},
        {"properties": {"a": {"type": "string"}}, "required": [["a"]]},
        {"properties": {"a": {"type": "string", "enum": []}}},
        {"properties": {f"p{i}": {"type": "string"} for i in range(MAX_ARGUMENTS + 1)}},
    ],
)
def test_what_the_format_cannot_hold_is_a_json_array(schema: Schema) -> None:
    assert source_of("qwen3_coder", schema).startswith('start: BREAKS? "[" call')


@pytest.mark.parametrize("count", [MAX_ARGUMENTS, MAX_ARGUMENTS + 10])
def test_many_optional_arguments(count: int) -> None:
    schema = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}}
    write = WRITERS["qwen3_coder"] if count <= MAX_ARGUMENTS else in_object("[", ", ", "]")
    assert accepts("qwen3_coder", schema, write([("f", {"p1": "x", f"p{count - 1}": "y"})]))


@pytest.mark.parametrize("kind", ["qwen3_coder", "gemma4"])
def test_many_words_to_choose_from(kind: str) -> None:
    words = ["", *(f"word {i}" for i in range(3000)), "word 1"]
    schema = {"type": "object", "properties": {"a": {"type": "string", "enum": words}}, "required": ["a"]}
    for word in ("", "word 7", "word 77", "word 2999"):
        assert accepts(kind, schema, WRITERS[kind]([("f", {"a": word})]))
    assert not accepts(kind, schema, WRITERS[kind]([("f", {"a": "word 3000"})]))


@pytest.mark.parametrize("name", ["%n%n", "%j", "%i", "f%n", "a%ib"])
def test_a_name_that_looks_like_a_field_of_the_layout(name: str) -> None:
    for kind in KIND_NAMES:
        tool_format, tokenizer = format_of(kind, special=False)
        structured, new_parser = tool_format.forced([tool(name, {"type": "object"})], names=[name], parallel=False)
        text = in_object("[", ", ", "]")([(name, {})])
        assert Grammar(structured, tokenizer).accepts(text)
        assert values(every_cut(new_parser, text)[2]) == [(name, {})]


class Counting(dict[str, Any]):
    """A schema that knows how often anybody asked it for a type."""

    num_looks = 0

    def get(self, key: str, default: Any = None) -> Any:
        Counting.num_looks += key == "type"
        return super().get(key, default)


@pytest.mark.parametrize("word", ["anyOf", "oneOf", "allOf"])
def test_choices_of_choices_are_not_followed_for_ever(word: str) -> None:
    definitions = {f"d{i}": Counting({word: [Counting({"$ref": f"#/$defs/d{i + 1}"})] * 64}) for i in range(8)}
    Counting.num_looks = 0
    assert types_of(Counting({"$ref": "#/$defs/d0"}), {"$defs": definitions}) == ALL
    assert 0 < Counting.num_looks < 1000


def test_long_references_are_not_followed() -> None:
    assert types_of({"$ref": "#/$defs/" + "a" * 2000}, {"$defs": {"a" * 2000: {"type": "string"}}}) == ALL
    assert types_of({"$ref": "#/$defs/a"}, {"$defs": {"a": {"type": "string"}}}) == {"string"}
