"""docs/api.md and the models that check requests tell of the same fields, at every depth."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel

from engine.outputs import Phase
from server.app import ROUTERS
from server.parsers.reasoning import FORMATS
from server.parsers.select import KINDS
from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import Kinds, Shape, WireModel
from server.protocol.messages import MessagesRequest
from server.protocol.responses import ResponsesRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/api.md").read_text(encoding="utf-8")
SHARED = "Fields of completions, chat and responses"
CHAT = "POST /v1/chat/completions"
# model of a body -> where its fields stand
SECTIONS: dict[type[WireModel], tuple[str, ...]] = {
    CompletionRequest: ("POST /v1/completions", SHARED),
    ChatRequest: (CHAT, SHARED),
    ResponsesRequest: ("POST /v1/responses", SHARED),
    MessagesRequest: ("POST /v1/messages",),
    EmbeddingRequest: ("POST /v1/embeddings",),
    TokenizeRequest: ("POST /tokenize", CHAT),
    DetokenizeRequest: ("POST /detokenize",),
}


def section(title: str) -> str:
    parts = re.split(r"^## (.+)$", DOCUMENT, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def documented(title: str) -> set[str]:
    """Names in the first column of the tables of fields."""
    names: set[str] = set()
    for table in re.findall(r"^\| field \|.*\n((?:\|.*\n)+)", section(title), flags=re.MULTILINE):
        for row in table.splitlines()[1:]:
            found = re.findall(r"`([^`]+)`", row.split("|")[1])
            assert found, row
            names.update(_plain(name) for each in found for name in _expanded(each))
    return names


def _expanded(name: str) -> Iterator[str]:
    """a.{b, c} -> a.b, a.c"""
    head, brace, rest = name.partition("{")
    if not brace:
        yield name
        return
    inner, _, tail = rest.partition("}")
    for each in inner.split(", "):
        yield from _expanded(head + each + tail)


def _plain(path: str) -> str:
    """Of lists and what they hold; what holds its like again is told once."""
    return re.sub(r"\b(\w+)(\.\1)+\b", r"\1", path.replace("[]", "").replace("input.tools.", "tools."))


def fields_of(model: type[WireModel]) -> set[str]:
    return set(map(_plain, _walk(model, "")))


def _walk(model: type[WireModel], path: str) -> Iterator[str]:
    for name in (*model.model_fields, *model.hints):
        yield path + name
    for name, read in model.shapes.items():
        yield from _loose(read, f"{path}{name}.")
    for name, info in model.model_fields.items():
        for nested, is_list in _models(info.annotation, is_list=False):
            yield from _walk(nested, f"{path}{name}{'[]' if is_list else ''}.")


def _loose(read: Shape | Kinds, path: str) -> Iterator[str]:
    shapes = [read] if isinstance(read, Shape) else [*read.shapes.values(), *filter(None, [read.untyped])]
    for each in shapes:
        for name in (*each.fields, *each.hints):
            yield path + name
        for name, inner in each.fields.items():
            if inner is not None:
                yield from _loose(inner, f"{path}{name}.")


def _models(annotation: Any, *, is_list: bool) -> Iterator[tuple[type[WireModel], bool]]:
    if isinstance(annotation, type) and not get_args(annotation):
        if issubclass(annotation, BaseModel):
            assert issubclass(annotation, WireModel)
            yield annotation, is_list
        return
    for argument in get_args(annotation):
        yield from _models(argument, is_list=is_list or get_origin(annotation) in (list, tuple))


@pytest.mark.parametrize("model", SECTIONS)
def test_every_field_is_documented(model: type[WireModel]) -> None:
    told = set[str]().union(*map(documented, SECTIONS[model]))
    assert fields_of(model) - told == set()


@pytest.mark.parametrize("title", sorted({title for titles in SECTIONS.values() for title in titles}))
def test_every_documented_field_is_known(title: str) -> None:
    known = set[str]().union(*(fields_of(model) for model, titles in SECTIONS.items() if title in titles))
    told = documented(title)
    assert len(told) > 2
    assert told - known == set()


def test_every_model_of_a_body_is_looked_at() -> None:
    for route in (route for router in ROUTERS for route in router.routes):
        extra = getattr(route, "openapi_extra", None) or {}
        if "requestBody" in extra:
            title = extra["requestBody"]["content"]["application/json"]["schema"]["title"]
            assert title in {model.__name__ for model in SECTIONS}


def test_every_route_is_documented() -> None:
    for route in (route for router in ROUTERS for route in router.routes):
        for method in getattr(route, "methods", None) or ():
            assert f"`{method} {getattr(route, 'path', '')}`".replace(":path}", "}") in section("Routes")


def test_every_format_of_calls_and_thinking_is_documented() -> None:
    for title, known in (("Tool formats", {kind.name for kind in KINDS}), ("Thinking", set(FORMATS))):
        (told,) = re.findall(rf"^{title}: ([^.]*)\.", section("Tools and thinking"), re.MULTILINE)
        assert set(re.split(r",\s+", told)) == known


def test_every_code_of_an_error_is_documented() -> None:
    rows = re.findall(r"^\| \d{3} \| \w+ \| (.*) \|$", section("Errors"), re.MULTILINE)
    told = set(re.findall(r"\b[a-z]+(?:_[a-z]+)*\b", " ".join(rows)))
    source = "".join(path.read_text("utf-8") for path in (ROOT / "server").rglob("*.py"))
    given = set(re.findall(r'\bcode(?:: str)?\s*=\s*"([a-z_]+)"', source))
    assert len(given) > 10
    assert given - told == set()
    made = {word for word in told if "_" in word and f'"{word}"' not in source}
    assert made == {f"server_{phase.value}" for phase in Phase} - {"server_ready"}
