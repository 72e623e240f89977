"""Fields of a body that nobody reads: found, named, and, where the operator wants it, refused.

Hints (fields that we know and that cannot change an answer here) and unknown fields are kept aside by pydantic; a walk
over the checked object finds them at any depth.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, model_validator

from server.protocol.errors import InvalidRequest
from server.protocol.parsing import wrong

MAX_FIELDS = 1024  # of one object that we read; no API has a tenth of it


def _describe_hints(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """For the description of the API: hints are fields too, of any kind."""
    for name in sorted(getattr(model, "hints", ())):
        schema.setdefault("properties", {})[name] = {"description": "Accepted; without effect."}


@dataclass(frozen=True, slots=True)
class Shape:
    """What is read of a field that is taken as a loose object. fields: name -> the shape of its value, where that is
    looked into too. hints: as in WireModel."""

    fields: Mapping[str, Shape | None] = field(default_factory=dict)
    hints: frozenset[str] = frozenset()


class WireModel(BaseModel):
    """Base of what is read from a body. hints: fields that are known, accepted and without effect. shapes: of fields
    that are loose objects here, and read elsewhere."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=(), json_schema_extra=_describe_hints
    )

    hints: ClassVar[frozenset[str]] = frozenset()
    shapes: ClassVar[Mapping[str, Shape]] = {}

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
    """Fields with a value that is not null and that no model declares, and no shape where the value is a loose
    object."""
    return _unread(wire, "", "")


def loose(given: Mapping[str, object], shape: Shape, path: str, name: str) -> Iterator[Unread]:
    """The same for a loose object. path, name: its own, with a dot at the end unless they are empty."""
    for key, value in given.items():
        if value is None:
            continue
        if key not in shape.fields:
            known = [*shape.fields, *shape.hints]
            yield Unread(path + key, name + key, key, key in shape.hints, known)
        elif (inner := shape.fields[key]) is not None and isinstance(value, dict):
            yield from loose(value, inner, f"{path}{key}.", f"{name}{key}.")


def _unread(wire: BaseModel, path: str, name: str) -> Iterator[Unread]:
    if isinstance(wire, WireModel):
        if wire.is_dropped:
            return
        if extra := wire.model_extra:
            known = [*type(wire).model_fields, *wire.hints]
            for key, value in extra.items():
                if value is not None:
                    yield Unread(path + key, name + key, key, key in wire.hints, known)
        for key, shape in wire.shapes.items():
            if isinstance(given := getattr(wire, key), dict):
                yield from loose(given, shape, f"{path}{key}.", f"{name}{key}.")
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
