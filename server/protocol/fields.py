"""Fields of a body that nobody reads: found, named, and, where the operator wants it, refused.

Hints (fields that we know and that cannot change an answer here) and unknown fields are kept aside by pydantic; a walk
over the checked object finds them at any depth.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict

from server.protocol.errors import InvalidRequest


def _describe_hints(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """For the description of the API: hints are fields too, of any kind."""
    for name in sorted(getattr(model, "hints", ())):
        schema.setdefault("properties", {})[name] = {"description": "Accepted; without effect."}


class WireModel(BaseModel):
    """Base of what is read from a body. hints: fields that are known, accepted and without effect."""

    model_config = ConfigDict(
        extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=(), json_schema_extra=_describe_hints
    )

    hints: ClassVar[frozenset[str]] = frozenset()

    @property
    def is_dropped(self) -> bool:
        """Whether it is left out as a whole, and named elsewhere."""
        return False


class Unread(NamedTuple):
    """One field that nobody reads. path: where it stands ("messages[1].name"); name: the same without list indices."""

    path: str
    name: str
    owner: type[WireModel]
    field: str

    @property
    def is_hint(self) -> bool:
        return self.field in self.owner.hints

    def refusal(self) -> InvalidRequest:
        """What a strict server says."""
        known = [*self.owner.model_fields, *self.owner.hints]
        near = difflib.get_close_matches(self.field.lower()[:64], known, n=1, cutoff=0.6)
        shown = self.path if len(self.path) <= 80 else self.path[:77] + "..."
        told = f"Unknown parameter: {shown!r}." + (f" Did you mean {near[0]!r}?" if near else "")
        return InvalidRequest(told.replace("'", '"'), param=shown, code="unknown_parameter")


def unread(wire: BaseModel) -> Iterator[Unread]:
    """Fields with a value that is not null and that no model declares."""
    return _unread(wire, "", "")


def _unread(wire: BaseModel, path: str, name: str) -> Iterator[Unread]:
    if isinstance(wire, WireModel):
        if wire.is_dropped:
            return
        for field, value in (wire.model_extra or {}).items():
            if value is not None:
                yield Unread(path + field, name + field, type(wire), field)
    for field in _fields_with_models(type(wire)):
        held: Any = getattr(wire, field)
        if isinstance(held, BaseModel):
            yield from _unread(held, f"{path}{field}.", f"{name}{field}.")
        elif isinstance(held, (list, tuple)):
            for index, item in enumerate(held):
                if isinstance(item, BaseModel):
                    yield from _unread(item, f"{path}{field}[{index}].", f"{name}{field}[].")


@lru_cache(maxsize=256)
def _fields_with_models(kind: type[BaseModel]) -> tuple[str, ...]:
    return tuple(name for name, info in kind.model_fields.items() if _names_model(info.annotation))


def _names_model(annotation: Any) -> bool:
    if isinstance(annotation, type) and not get_args(annotation):
        return issubclass(annotation, BaseModel)
    return any(map(_names_model, get_args(annotation)))
