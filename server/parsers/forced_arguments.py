"""Rules for calls that write one argument after the other, each in the format's own way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.grammar import Spelling, json_term, literal
from server.parsers.schema import Tools

# what a schema may say beside its arguments, and a string beside its type, without narrowing them
_OBJECT_KEYS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"))
_WORDS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"))
_STRING = frozenset(("string",))


class ByArgument(Exception):
    """The schema says more than which arguments there are, or a value cannot be written alone."""


@dataclass(frozen=True)
class Arguments:
    """key: before a value, with %k for the argument's name; key_of_json: before values that are no strings, if
    different. end: after a value. between: two arguments. quote: on both sides of a string; as_json: strings are
    written as in JSON."""

    key: str
    key_of_json: str = ""
    end: str = ""
    between: str = ""
    quote: str = ""
    as_json: bool = False


def arguments_rules(rule: str, form: Arguments, schema: Mapping[str, Any], spelling: Spelling) -> list[str]:
    """Lines that define `rule`: the arguments in the schema's order, optional ones or not. Raises ByArgument."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    narrowed = schema.keys() - _OBJECT_KEYS - _WORDS
    if narrowed or not isinstance(properties, dict) or not isinstance(required, list) or set(required) - {*properties}:
        raise ByArgument
    lines: list[str] = []
    for i, (key, value) in enumerate(properties.items()):
        lines += _argument(f"{rule}_{i}", form, key, value, schema, spelling)
    count = len(properties)
    needed = [key in required for key in properties]
    between = spelling.term(form.between)
    for i in reversed(range(count)):
        # first: none has been written yet; more: after another
        skip = [] if needed[i] else [f"{rule}_first_{i + 1}"]
        lines.append(f"{rule}_first_{i}: " + " | ".join([f"{rule}_{i} {rule}_more_{i + 1}", *skip]))
        one = f"{between} {rule}_{i}"
        lines.append(f"{rule}_more_{i}: {one if needed[i] else f'({one})?'} {rule}_more_{i + 1}")
    lines += [f'{rule}_first_{count}: ""', f'{rule}_more_{count}: ""', f"{rule}: {rule}_first_0"]
    return lines


def _argument(
    rule: str, form: Arguments, key: str, schema: object, root: Mapping[str, Any], spelling: Spelling
) -> list[str]:
    if not isinstance(schema, dict) or not key or key != key.strip() or set(key) & set('<>{}"=:,\n'):
        raise ByArgument
    types = Tools([{"name": "f", "parameters": dict(root)}]).types("f", key)
    if "string" not in types or form.as_json:
        head = (form.key_of_json or form.key).replace("%k", key)
        return [f"{rule}: {spelling.term(head)} {json_term(_alone(schema, root))} {spelling.term(form.end)}"]
    head = spelling.term(form.key.replace("%k", key) + form.quote)
    end = form.quote + form.end
    narrowed = schema.keys() - _WORDS - {"type"}
    if types == _STRING and isinstance(choices := schema.get("enum"), list) and narrowed == {"enum"}:
        if any(not isinstance(choice, str) or end.strip() in choice for choice in choices):
            raise ByArgument
        return [f"{rule}: {head} ({' | '.join(map(literal, choices))}) {spelling.term(end)}"]
    if types != _STRING or narrowed:
        raise ByArgument
    if spelling.has_special(end):  # the text may have the line break before it, which the parser takes off
        return [f"{rule}: {head} {rule}_text {spelling.term(end.lstrip())}", f"{rule}_text: /(.|\\n)*/"]
    return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={literal(end)}]: /(.|\\n)*/"]


def _alone(schema: dict[str, Any], root: Mapping[str, Any]) -> dict[str, Any]:
    """A property's schema with the definitions it may refer to. Raises ByArgument where it refers to other places."""
    definitions = {key: root[key] for key in ("$defs", "definitions") if key in root}
    alone = {**schema, **definitions}
    if any(not ref.startswith(("#/$defs/", "#/definitions/")) for ref in _references(alone)):
        raise ByArgument
    return alone


def _references(value: object) -> list[str]:
    found: list[str] = []
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            found += [ref for key, ref in value.items() if key == "$ref" and isinstance(ref, str)]
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
    return found
