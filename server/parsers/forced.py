"""Grammars under which a model can only write valid calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.sampling_params import InvalidParameter, StructuredOutput
from server.parsers.base import OutputParser
from server.parsers.json_calls import JsonCalls, JsonMarks
from server.parsers.schema import Tools

# as models were trained to write JSON; and bounded, so that none can go on in blanks for ever
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def forced(
    tools: Sequence[Mapping[str, Any]], *, names: Sequence[str], parallel: bool
) -> tuple[StructuredOutput, Callable[[], OutputParser]]:
    """A JSON array of calls, for formats whose own syntax a grammar cannot hold to a schema.

    Raises InvalidParameter for a tool whose schema is no object's."""
    known = Tools(tools)
    rules = [f"call_{i}" for i in range(len(names))]
    more = ' (", " call)*' if parallel else ""
    lines = [f'start: "[" call{more} "]"', f"call: {' | '.join(rules)}"]
    for rule, name in zip(rules, names, strict=True):
        lines.append(f"{rule}: {text(_head(name))} {json_rule(arguments_schema(known, name))} {text('}')}")
    return StructuredOutput("lark", "\n".join(lines)), lambda: JsonCalls(JsonMarks((), bare=True), known)


def _head(name: str) -> str:
    return '{"name": ' + json.dumps(name, ensure_ascii=False) + ', "arguments": '


def arguments_schema(tools: Tools, name: str) -> dict[str, Any]:
    """The schema of a tool's arguments. Raises InvalidParameter if it is no object's."""
    schema = tools.schemas.get(name) or {"type": "object"}
    if schema.get("type", "object") != "object":
        raise InvalidParameter("tools", f"The parameters of tool {name} must be of type object.")
    return {**schema, "type": "object"}


def json_rule(schema: Mapping[str, Any]) -> str:
    """A JSON value of `schema`, as a term of a Lark grammar."""
    return "%json " + json.dumps({**schema, "x-guidance": JSON_STYLE})


def text(literal: str) -> str:
    """`literal` as a term of a Lark grammar."""
    return json.dumps(literal, ensure_ascii=False)
