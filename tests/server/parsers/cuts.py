"""Parts of a text however it is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

from server.parsers.base import CallArguments, CallBegin, Content, OutputParser, Part, Reasoning

Maker = Callable[[], OutputParser]
# what came of a text: (reasoning, content, [(name, arguments)])
Told = tuple[str, str, list[tuple[str, str]]]


def run(make: Maker, pieces: Iterable[str]) -> list[Part]:
    parser = make()
    parts = [part for piece in pieces for part in parser.feed(piece)]
    return parts + parser.finish()


def told(parts: Iterable[Part]) -> Told:
    """Checks what holds for all parts, and sums them up."""
    reasoning = content = ""
    calls: list[tuple[str, list[str]]] = []
    ids: set[str] = set()
    for part in parts:
        match part:
            case Content(text):
                content += text
            case Reasoning(text):
                assert not content
                assert not calls
                reasoning += text
            case CallBegin(index, call_id, name):
                assert index == len(calls)
                assert call_id not in ids
                assert name
                ids.add(call_id)
                calls.append((name, []))
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1].append(text)
        assert not hasattr(part, "text") or part.text
    return reasoning, content, [(name, "".join(texts)) for name, texts in calls]


def every_cut(make: Maker, text: str) -> Told:
    """The one answer to all cuts of `text`: whole, in two at every place, in single characters, at random."""
    whole = told(run(make, [text]))
    assert told(run(make, text)) == whole, "single characters"
    for at in range(1, len(text)):
        assert told(run(make, [text[:at], text[at:]])) == whole, (text[:at], text[at:])
    dice = random.Random(text)
    for _ in range(30):
        cuts = sorted(dice.sample(range(len(text) + 1), min(len(text), dice.randint(1, 12))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert told(run(make, pieces)) == whole, pieces
    return whole


def values(calls: Iterable[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A tool whose arguments have these schemas (a word: that type)."""
    schemas = {key: {"type": value} if isinstance(value, str) else value for key, value in properties.items()}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": schemas}}}


TOOLS = [
    tool("get_weather", city="string", days="integer", exact="boolean", spot="object", hours="array", level="number"),
    tool("write_file", path="string", text="string"),
    tool("now"),
]
