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
_MAX_STEPS = 16  # references and choices within choices that are followed
_MAX_LOOKS = 256  # schemas that are looked at: choices of choices multiply
_MAX_CHOICES = 64
_MAX_REFERENCE_CHARS = 1024
MAX_LITERAL_CHARS = 10_000  # Python's own parser is asked only about what it can read quickly


class Tools:
    """Tools of one request, as the chat API has them: {"type": "function", "function": {"name", "parameters"}}."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        functions = [tool.get("function", tool) for tool in tools]
        self.schemas: dict[str, dict[str, Any]] = {
            function["name"]: function.get("parameters") or {} for function in functions if function.get("name")
        }
        self._types: dict[tuple[str, str], frozenset[str]] = {}

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
        known = self._types.get((name, argument))
        if known is not None:
            return known
        root = self.schemas.get(name)
        properties = root.get("properties") if isinstance(root, dict) else None
        if not isinstance(properties, dict) or argument not in properties:
            return ALL
        types = self._types[name, argument] = types_of(properties[argument], root)
        return types


def types_of(schema: object, root: object) -> frozenset[str]:
    """JSON types that a value of `schema`, a part of `root`, may have; all of them where that is not plain to see."""
    return _Types(root).of(schema, _MAX_STEPS)


class _Types:
    """One look-up, which ends whatever the schema."""

    def __init__(self, root: object) -> None:
        self._root = root
        self._looks = _MAX_LOOKS

    def of(self, schema: object, steps: int) -> frozenset[str]:
        self._looks -= 1
        if not isinstance(schema, dict) or steps < 0 or self._looks < 0:
            return ALL
        named = schema.get("type")
        if isinstance(named, (str, list)):
            types = frozenset([named] if isinstance(named, str) else (t for t in named if isinstance(t, str))) & ALL
            return types or ALL
        if "const" in schema or isinstance(schema.get("enum"), list):
            return frozenset(map(type_of, schema.get("enum") or [schema.get("const")]))
        if isinstance(reference := schema.get("$ref"), str):
            return self.of(_resolve(reference, self._root), steps - 1)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(choices := schema.get(key), list) and choices:
                found = [self.of(choice, steps - 4) for choice in choices[:_MAX_CHOICES]]
                return frozenset.intersection(*found) or ALL if key == "allOf" else frozenset.union(*found)
        return ALL


def _resolve(reference: str, root: object) -> object:
    """A local reference, "#/$defs/name"."""
    if len(reference) > _MAX_REFERENCE_CHARS:
        return None
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
