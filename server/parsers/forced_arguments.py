"""Rules for calls that write one argument after the other, each in the format's own way."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from server.parsers.grammar import Spelling, json_term, literal, one_of
from server.parsers.schema import types_of

# what a schema may say beside its arguments, and a string beside its type, without narrowing them
_OBJECT_KEYS = frozenset(("type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"))
_WORDS = frozenset(("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"))
_STRING = frozenset(("string",))
_PLACES = ("$defs", "definitions")

MAX_ARGUMENTS = 100  # of a tool: the compiler follows all optional ones at once, and has a limit for that
MAX_COPIED_CHARS = 64 << 10  # of definitions, in all arguments of all tools together


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


class Definitions:
    """The definitions of one tool's schema, as far as its arguments refer to them.

    Each argument is a grammar of its own and has its own copy of what it needs, so a few definitions that all
    arguments share could grow without bound: `copied` counts the characters of all copies, those before included."""

    def __init__(self, root: Mapping[str, Any], copied: int) -> None:
        self._all: dict[str, dict[str, Any]] = {
            place: found for place in _PLACES if isinstance(found := root.get(place), dict)
        }
        self._known: dict[tuple[str, str], tuple[int, list[str]]] = {}
        self.copied = copied

    def alone(self, schema: dict[str, Any]) -> dict[str, Any]:
        """`schema` with the definitions it refers to, at once or through others. Raises ByArgument where it refers to
        other places, or where the copies have become too many."""
        needed: dict[str, dict[str, Any]] = {}
        waiting = list(_references(schema))
        while waiting:
            place, name = self._named(waiting.pop())
            if name in needed.get(place, ()):
                continue
            needed.setdefault(place, {})[name] = self._all[place][name]
            size, further = self._look(place, name)
            self.copied += size
            if self.copied > MAX_COPIED_CHARS:
                raise ByArgument
            waiting += further
        return {**schema, **needed}

    def _named(self, reference: str) -> tuple[str, str]:
        """(place, name) of "#/$defs/NAME" or of something inside it."""
        first, _, rest = reference.removeprefix("#/").partition("/")
        name = rest.partition("/")[0].replace("~1", "/").replace("~0", "~")
        if not reference.startswith("#/") or name not in self._all.get(first, ()):
            raise ByArgument
        return first, name

    def _look(self, place: str, name: str) -> tuple[int, list[str]]:
        """(its length as JSON, where it refers to); looked at once."""
        known = self._known.get((place, name))
        if known is None:
            made = self._all[place][name]
            known = self._known[place, name] = len(json.dumps({name: made})), list(_references(made))
        return known


def arguments_rules(
    rule: str, form: Arguments, schema: Mapping[str, Any], spelling: Spelling, definitions: Definitions
) -> list[str]:
    """Lines that define `rule`: the arguments in the schema's order, optional ones or not. definitions: the schema's.
    Raises ByArgument."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list) or len(properties) > MAX_ARGUMENTS:
        raise ByArgument
    if schema.keys() - _OBJECT_KEYS - _WORDS or any(type(key) is not str for key in required):
        raise ByArgument
    wanted = frozenset(required)
    if wanted - properties.keys():
        raise ByArgument
    lines: list[str] = []
    for i, (key, value) in enumerate(properties.items()):
        lines += _argument(f"{rule}_{i}", form, key, value, types_of(value, schema), definitions, spelling)
    count = len(properties)
    needed = [key in wanted for key in properties]
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
    rule: str,
    form: Arguments,
    key: str,
    schema: object,
    types: frozenset[str],
    definitions: Definitions,
    spelling: Spelling,
) -> list[str]:
    if not isinstance(schema, dict) or not key or key != key.strip() or set(key) & set('<>{}"=:,\n'):
        raise ByArgument
    if "string" not in types or form.as_json:
        head = (form.key_of_json or form.key).replace("%k", key)
        value = json_term(definitions.alone(schema))
        return [f"{rule}: {spelling.term(head)} {value} {spelling.term(form.end)}"]
    head = spelling.term(form.key.replace("%k", key) + form.quote)
    end = form.quote + form.end
    narrowed = schema.keys() - _WORDS - {"type"}
    if types == _STRING and isinstance(choices := schema.get("enum"), list) and narrowed == {"enum"}:
        if not choices or any(not isinstance(choice, str) or end.strip() in choice for choice in choices):
            raise ByArgument
        return [f"{rule}: {head} {rule.upper()} {spelling.term(end)}", f"{rule.upper()}: {one_of(choices)}"]
    if types != _STRING or narrowed:
        raise ByArgument
    if spelling.has_special(end):  # the text may have the line break before it, which the parser takes off
        return [f"{rule}: {head} {rule}_text {spelling.term(end.lstrip())}", f"{rule}_text: /(.|\\n)*/"]
    return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={literal(end)}]: /(.|\\n)*/"]


def _references(value: object) -> Iterator[str]:
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            yield from (ref for key, ref in value.items() if key == "$ref" and isinstance(ref, str))
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
