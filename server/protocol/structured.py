"""What a request says about the form of its text: response_format, structured_outputs, and vLLM's older guided_*.

Only the form of the fields is checked here; whether a schema, pattern or grammar makes sense is the engine's business
(`Engine.compile`), which names the same field in its complaint.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import orjson

from engine.sampling_params import StructuredOutput
from server.parsers.grammar import enforceable
from server.protocol.common import MAX_CHOICES, GenerationRequest
from server.protocol.errors import InvalidRequest
from server.protocol.parsing import short, too_deep

MAX_SCHEMA_NAME_CHARS = 64

_SCHEMA_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}", re.ASCII)


def structured_output(body: GenerationRequest) -> StructuredOutput | None:
    """The one form that the text must have; None where the request asks for none.

    Raises InvalidRequest for a malformed field, and for more than one form."""
    asked = [form for form in (*_guided(body), _structured_outputs(body), _response_format(body)) if form is not None]
    if len(asked) > 1:
        raise InvalidRequest(
            f"{asked[1].param} cannot be combined with {asked[0].param}: a text has one form.", param=asked[1].param
        )
    return asked[0] if asked else None


def _response_format(body: GenerationRequest) -> StructuredOutput | None:
    """OpenAI's: {"type": "text" | "json_object" | "json_schema", "json_schema": {"name", "schema", "strict"}}."""
    given = body.response_format
    if given is None:
        return None
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutput("json_object", param="response_format")
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format.type must be text, json_object or json_schema, got {short(kind)}.",
            param="response_format.type",
        )
    path = "response_format.json_schema"
    described = given.get("json_schema")
    if not isinstance(described, dict):
        raise InvalidRequest(f"{path} must be an object with name and schema, got {short(described)}.", param=path)
    name = described.get("name")
    if not isinstance(name, str) or not _SCHEMA_NAME.fullmatch(name):
        raise InvalidRequest(
            f"{path}.name must have 1 to {MAX_SCHEMA_NAME_CHARS} letters, digits, underscores and dashes, "
            f"got {short(name)}.",
            param=f"{path}.name",
        )
    strict = described.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{path}.strict must be a boolean, got {short(strict)}.", param=f"{path}.strict")
    return _json(described.get("schema"), f"{path}.schema")


def _structured_outputs(body: GenerationRequest) -> StructuredOutput | None:
    """vLLM's: an object with one of json, regex, choice, grammar, json_object."""
    given = body.structured_outputs
    if given is None:
        return None
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in _FORMS:
            raise InvalidRequest(
                f"structured_outputs has {short(name)}; it may have {', '.join(_FORMS)}.",
                param=f"structured_outputs.{name[:40]}",
            )
    if len(given) != 1:
        raise InvalidRequest(
            f"structured_outputs must have exactly one of {', '.join(_FORMS)}.", param="structured_outputs"
        )
    ((name, value),) = given.items()
    return _FORMS[name](value, f"structured_outputs.{name}")


def _guided(body: GenerationRequest) -> list[StructuredOutput | None]:
    """What vLLM called the same before it had structured_outputs."""
    given = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    return [_FORMS[name](value, f"guided_{name}") for name, value in given.items() if value is not None]


def _json(schema: Any, param: str) -> StructuredOutput:
    """A schema, as an object or (vLLM) spelled out in a string."""
    if isinstance(schema, str) and not param.startswith("response_format"):
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise InvalidRequest(f"{param} is not valid JSON: {error.msg}.", param=param) from None
    if not isinstance(schema, (dict, bool)):
        raise InvalidRequest(f"{param} must be a JSON schema, got {short(schema)}.", param=param)
    if too_deep(schema):  # one that came as a string
        raise InvalidRequest(f"{param} is nested too deeply.", param=param)
    return StructuredOutput("json", orjson.dumps(enforceable(schema)).decode(), param)


def _json_object(wanted: Any, param: str) -> StructuredOutput | None:
    if not isinstance(wanted, bool):
        raise InvalidRequest(f"{param} must be a boolean, got {short(wanted)}.", param=param)
    return StructuredOutput("json_object", param=param) if wanted else None


def _regex(pattern: Any, param: str) -> StructuredOutput:
    return StructuredOutput("regex", _text(pattern, param), param)


def _grammar(source: Any, param: str) -> StructuredOutput:
    if "::=" in _text(source, param):
        raise InvalidRequest(f"{param} must be a Lark grammar; this one looks like GBNF (::=).", param=param)
    return StructuredOutput("lark", source, param)


def _choice(choices: Any, param: str) -> StructuredOutput:
    if not isinstance(choices, list) or not choices or any(type(item) is not str or not item for item in choices):
        raise InvalidRequest(f"{param} must be a list of one or more strings that are not empty.", param=param)
    if len(choices) > MAX_CHOICES:
        raise InvalidRequest(f"{param} must have at most {MAX_CHOICES} strings, got {len(choices)}.", param=param)
    return StructuredOutput("choice", orjson.dumps(choices).decode(), param)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{param} must be a string that is not empty, got {short(value)}.", param=param)
    return value


_FORMS: dict[str, Callable[[Any, str], StructuredOutput | None]] = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
}
