"""What the request's tools say about a call: names, and the JSON type of each argument.

Tags formats write every value as bare text; the schema decides what it is: "5" stays a string where the tool wants
one. What does not fit its type stays a string, so nothing that the model wrote is lost.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from server.parsers.json_text import well_formed

ALL = frozenset(("string", "integer", "number", "boolean", "object", "array", "null"))
_WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
_MAX_REFS = 16
MAX_LITERAL_CHARS = 10_000  # Python's own parser is asked only about what it can read quickly


class Tools:
    """Tools of one request, as the chat API has them: {"type": "function", "function": {"name", "parameters"}}."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self.schemas: dict[str, dict[str, Any]] = {
            function["name"]: function.get("parameters") or {} for function in functions if function.get("name")
        }

    @property
    def names(self) -> Iterable[str]:
        return self.schemas.keys()

    def arguments(self, name: str) -> list[str]:
        """Names of a tool's arguments, in the order of its schema."""
        schema = self.schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return list(properties) if isinstance(properties, dict) else []

    def types(self, name: str, argument: str) -> frozenset[str]:
        """JSON types the argument may have; all of them where the schema does not say."""
        root = self.schemas.get(name)
        properties = root.get("properties") if isinstance(root, dict) else None
        schema = properties.get(argument) if isinstance(properties, dict) else None
        return _types(schema, root, _MAX_REFS) if isinstance(schema, dict) else ALL


def _types(schema: object, root: object, refs: int) -> frozenset[str]:
    if not isinstance(schema, dict) or refs < 0:
        return ALL
    named = schema.get("type")
    if isinstance(named, (str, list)):
        types = frozenset([named] if isinstance(named, str) else filter(lambda t: isinstance(t, str), named)) & ALL
        return types or ALL
    if "const" in schema or isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema.get("enum") or [schema.get("const")]))
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolve(reference, root), root, refs - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(choices := schema.get(key), list) and choices:
            found = [_types(choice, root, refs - 4) for choice in choices[:64]]
            return frozenset.intersection(*found) or ALL if key == "allOf" else frozenset.union(*found)
    return ALL


def _resolve(reference: str, root: object) -> object:
    """A local reference, "#/$defs/name"."""
    value = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        step = step.replace("~1", "/").replace("~0", "~")
        value = value.get(step) if isinstance(value, dict) else None
    return value


def type_of(value: object) -> str:
    """The JSON type of a Python value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def typed(text: str, types: frozenset[str]) -> str:
    """JSON text of the value that `text` is, of one of `types` if it can be read as such, else a string."""
    bare = text.strip()
    if types != {"string"} and bare:
        for value in _readings(bare):
            kind = type_of(value)
            fits = kind in types or (kind == "integer" and "number" in types)
            if fits and kind != "string":
                return well_formed(json.dumps(value, ensure_ascii=False))
            if kind == "number" and "integer" in types and float(value).is_integer():
                return str(int(value))
        if "string" not in types and bare[0] == '"' and (value := _json(bare)) is not None:
            return well_formed(json.dumps(value, ensure_ascii=False))
    return json.dumps(text, ensure_ascii=False)


def _readings(text: str) -> Iterable[Any]:
    """The values that `text` may mean: as JSON, as a word such as True, as a Python literal."""
    try:
        yield json.loads(text, parse_constant=_refuse, parse_float=_finite)
        return
    except (ValueError, RecursionError):
        pass
    if word := _WORDS.get(text.lower()):
        yield json.loads(word)
    elif text[0] in "{[(" and len(text) <= MAX_LITERAL_CHARS:
        try:
            value = ast.literal_eval(text)
            json.dumps(value, allow_nan=False)
            yield list(value) if isinstance(value, tuple) else value
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> float:
    raise ValueError(word)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(digits)
    return value
