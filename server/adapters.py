"""The LoRA adapters that are served beside the model, as an operator names them: --lora-modules.

Three spellings of one: NAME=PATH; vLLM's JSON object {"name", "path", "base_model_name"}, or a list of them; in TOML a
table of paths by name, or tables like that object. A name is what clients send as `model` and what metrics have for a
label, so it is short, printable, without commas (metrics join names with them), and no other's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.config import Adapter, StartError

MAX_NAME = 256  # characters
FORM = 'must be NAME=PATH or {"name": NAME, "path": PATH}'
KEYS = ("name", "path", "base_model_name")


@dataclass(frozen=True, slots=True)
class LoraModule(Adapter):
    """base_model_name: what /v1/models shows as its parent; empty: the first name of the model."""

    base_model_name: str = ""


def parse_modules(value: object) -> tuple[LoraModule, ...]:
    """Raises ValueError with one sentence."""
    modules = tuple(_read(value))
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"must not name two adapters alike, got {shown(name)} twice")
    return modules


def check_names(modules: Iterable[Adapter], model_names: Sequence[str]) -> None:
    """Raises StartError where an adapter is called like the model."""
    for module in modules:
        if module.name in model_names:
            raise StartError(f"--lora-modules: {shown(module.name)} is a name of the model itself.")


def _read(value: object) -> Iterator[LoraModule]:
    if isinstance(value, Mapping):
        for name, path in value.items():
            yield _made({"name": name, "path": path})
    elif isinstance(value, str):
        yield from _from_text(value)
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, LoraModule):
                yield item
            else:
                yield from _from_text(item) if isinstance(item, str) else [_made(item)]
    else:
        raise ValueError(f"{FORM}, got {shown(value)}")


def _from_text(text: str) -> Iterator[LoraModule]:
    if text.lstrip().startswith(("{", "[")):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise ValueError(f"is not valid JSON, got {shown(text)}") from None
        for item in found if isinstance(found, list) else [found]:
            yield _made(item)
        return
    for piece in text.split(","):
        name, equals, path = piece.partition("=")
        if not equals:
            raise ValueError(f"{FORM}, got {shown(piece)}")
        yield _made({"name": name.strip(), "path": path.strip()})


def _made(given: object) -> LoraModule:
    if not isinstance(given, Mapping):
        raise ValueError(f"{FORM}, got {shown(given)}")
    for key, value in given.items():
        if key not in KEYS:
            raise ValueError(f"must have no other keys than {', '.join(KEYS)}, got {shown(key)}")
        if not isinstance(value, str) and not (value is None and key == "base_model_name"):
            raise ValueError(f"must have texts for its keys, got {shown(value)} for {key}")
    name, path = given.get("name", ""), given.get("path", "")
    if not name or name != name.strip() or not name.isprintable() or "," in name or len(name) > MAX_NAME:
        raise ValueError(
            f"must have names of 1 to {MAX_NAME} printable characters without commas or blanks around them, "
            f"got {shown(name)}"
        )
    if {".", ".."} & set(name.split("/")):  # clients take them out of /v1/models/NAME
        raise ValueError(f"must not have . or .. for a name or a part of one, got {shown(name)}")
    if not path.strip() or "\0" in path:
        raise ValueError(f"must have a path for {shown(name)}, got {shown(path)}")
    return LoraModule(name, path, given.get("base_model_name") or "")


def shown(value: object) -> str:
    """As it would stand in Python, cut short: for a sentence."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
