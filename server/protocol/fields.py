"""Fields of a body that nobody reads: found, named, and, where the operator wants it, refused.

Hints (fields that we know and that cannot change an answer here) and unknown fields are kept aside by pydantic; a walk
over the checked object finds them at any depth.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from server.protocol.errors import InvalidRequest
from server.protocol.parsing import wrong

MAX_FIELDS = 1024  # of one object that we read; no API has a tenth of it


HINT = {"description": "Accepted; without effect."}  # in the description of the API


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """For the description of the API: hints are fields too, of any kind, and what is loose has fields."""
    properties = schema.setdefault("properties", {})
    for name in sorted(getattr(model, "hints", ())):
        properties[name] = HINT
    for name, read in getattr(model, "shapes", {}).items():
        told = properties[name]
        if "type" not in told and "anyOf" not in told:  # of any type: a text, or what else could say it
            told["anyOf"] = [{"type": "string"}, {"type": "array"}, {"type": "null"}]
        for each in told.get("anyOf", [told]):
            if each.get("type") == "array":
                each["items"] = _described(read)
            elif each.get("type") == "object":
                each |= _described(read)


def _described(read: Shape | Kinds, kind: str | None = None) -> dict[str, Any]:
    """JSON schema of one object."""
    if isinstance(read, Kinds):
        other = {"type": "object", "description": "Of another type: dropped, or refused."}
        return {"anyOf": [*(_described(each, kind) for kind, each in read.shapes.items()), other]}
    properties: dict[str, Any] = {}
    for name, inner in read.fields.items():
        if isinstance(inner, Kinds):
            properties[name] = {"anyOf": [{"type": "array", "items": _described(inner)}, {"type": ["string", "null"]}]}
        else:
            properties[name] = {} if inner is None else _described(inner)
    if kind is not None:
        properties["type"] = {"const": kind}
    return {"type": "object", "properties": properties | dict.fromkeys(sorted(read.hints), HINT)}


@dataclass(frozen=True, slots=True)
class Shape:
    """What is read of a loose object, or of each object of an array. fields: name -> the shape of its value, where
    that is looked into too. hints: as in WireModel."""

    fields: Mapping[str, Shape | Kinds | None]
    hints: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Kinds:
    """Loose objects of several kinds, told apart by their `type`. A type that is not here is not looked into: whoever
    reads the object drops it, and names it, or refuses it. untyped: those without a type."""

    shapes: Mapping[str, Shape]
    untyped: Shape | None = None

    def of(self, given: Mapping[str, object]) -> Shape | None:
        kind = given.get("type")
        if kind is None:
            return self.untyped
        return self.shapes.get(kind) if isinstance(kind, str) else None


def shape(*names: str, hints: Iterable[str] = (), **inner: Shape | Kinds) -> Shape:
    """An object of these fields; those of `inner` are looked into."""
    return Shape({**dict.fromkeys(names), **inner}, frozenset(hints))


class WireModel(BaseModel):
    """Base of what is read from a body. hints: fields that are known, accepted and without effect. shapes: of fields
    that are loose here, and read elsewhere."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=(), json_schema_extra=_describe
    )

    hints: ClassVar[frozenset[str]] = frozenset()
    shapes: ClassVar[Mapping[str, Shape | Kinds]] = {}

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: object) -> object:
        """Counted before any is looked at: each that is unknown costs more than its bytes."""
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise wrong(f"must have at most {MAX_FIELDS} fields, got {len(data)}.")
        return data

    @property
    def is_dropped(self) -> bool:
        """Whether it is left out as a whole, and named elsewhere."""
        return False


class Unread(NamedTuple):
    """One field that nobody reads. path: where it stands ("messages[1].name"); name: the same without list indices;
    known: the names that would be read in its place."""

    path: str
    name: str
    field: str
    is_hint: bool
    known: Sequence[str]

    def refusal(self) -> InvalidRequest:
        """What a strict server says."""
        near = difflib.get_close_matches(self.field.lower()[:64], self.known, n=1, cutoff=0.6)
        shown = self.path if len(self.path) <= 80 else self.path[:77] + "..."
        told = f"Unknown parameter: {shown!r}." + (f" Did you mean {near[0]!r}?" if near else "")
        return InvalidRequest(told.replace("'", '"'), param=shown, code="unknown_parameter")


def unread(wire: BaseModel) -> Iterator[Unread]:
    """Fields with a value that is not null and that no model declares, nor a shape where the value is loose. Raises
    InvalidRequest for a loose object of too many fields."""
    return _unread(wire, "", "")


def _loose(given: object, read: Shape | Kinds, path: str, name: str) -> Iterator[Unread]:
    """The same for a value of any kind. path, name: its own."""
    if isinstance(given, list):
        for index, item in enumerate(given):
            if isinstance(item, dict):
                yield from _loose(item, read, f"{path}[{index}]", f"{name}[]")
        return
    if not isinstance(given, dict):
        return
    found = read.of(given) if isinstance(read, Kinds) else read
    if found is None:
        return
    if len(given) > MAX_FIELDS:
        raise InvalidRequest(f"{path} must have at most {MAX_FIELDS} fields, got {len(given)}.", param=path)
    for key, value in given.items():
        if value is None:
            continue
        if key not in found.fields:
            known = [*found.fields, *found.hints]
            yield Unread(f"{path}.{key}", f"{name}.{key}", key, key in found.hints, known)
        elif (inner := found.fields[key]) is not None:
            yield from _loose(value, inner, f"{path}.{key}", f"{name}.{key}")


def _unread(wire: BaseModel, path: str, name: str) -> Iterator[Unread]:
    if isinstance(wire, WireModel):
        if wire.is_dropped:
            return
        if extra := wire.model_extra:
            known = [*type(wire).model_fields, *wire.hints]
            for key, value in extra.items():
                if value is not None:
                    yield Unread(path + key, name + key, key, key in wire.hints, known)
        for key, read in wire.shapes.items():
            yield from _loose(getattr(wire, key), read, path + key, name + key)
    for key in _fields_with_models(type(wire)):
        held: Any = getattr(wire, key)
        if isinstance(held, BaseModel):
            yield from _unread(held, f"{path}{key}.", f"{name}{key}.")
        elif isinstance(held, (list, tuple)):
            for index, item in enumerate(held):
                if isinstance(item, BaseModel):
                    yield from _unread(item, f"{path}{key}[{index}].", f"{name}{key}[].")


@lru_cache(maxsize=256)
def _fields_with_models(kind: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, info in kind.model_fields.items() if _names_model(info.annotation))


def _names_model(annotation: Any) -> bool:
    if isinstance(annotation, type) and not get_args(annotation):
        return issubclass(annotation, BaseModel)
    return any(map(_names_model, get_args(annotation)))
