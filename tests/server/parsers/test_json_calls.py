from __future__ import annotations

from typing import Any

import pytest

from server.parsers.formats import KINDS
from server.parsers.schema import Tools
from tests.server.parsers.cuts import TOOLS, Maker, every_cut, values


def maker(name: str) -> Maker:
    kind = next(kind for kind in KINDS if kind.name == name)
    return lambda: kind.make(Tools(TOOLS))


HERMES: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("Plain words, no call.\n", "Plain words, no call.\n", []),
    (
        'I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 😀 {[\\"", "days": 2}}\n'
        "</tool_call>",
        "I look.",
        [("get_weather", {"city": 'Köln 😀 {["', "days": 2})],
    ),
    (
        '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n<tool_call>\n{"name": "get_weather", "arguments":'
        ' {"spot": {"a": [1, {"b": "</tool_call> <tool_call>"}]}}}\n</tool_call>\n\nDone. ',
        "Done.",
        [("now", {}), ("get_weather", {"spot": {"a": [1, {"b": "</tool_call> <tool_call>"}]}})],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "now"}</tool_call>', "", [("now", {"a": 1})]),
    ('<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
    ('<tool_call>{"name": "now", "arguments": null}</tool_call>', "", [("now", {})]),
    ('<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"b\\"}"}</tool_call>', "", [("now", {"a": "b"})]),
    ('<tool_call>{"type": "function", "function": {"name": "now", "parameters": {}}}</tool_call>', "", [("now", {})]),
    ('<tool_call>[{"name": "now", "arguments": {}}, {"name": "now", "arguments": {"a": []}}]</tool_call>', "",
     [("now", {}), ("now", {"a": []})]),
    # slips: a bracket too few, too many, no closing mark, bare control characters and backslashes inside strings
    ('<tool_call>{"name": "now", "arguments": {"a": 1}\n</tool_call>', "", [("now", {"a": 1})]),
    ('<tool_call>{"name": "now", "arguments": {"a": 1}}}\n</tool_call>', "", [("now", {"a": 1})]),
    ('<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}', "", [("now", {})] * 2),
    ('<tool_call>{"name": "now", "arguments": {"a": "x\n\ty\\d\\uZZ"}}</tool_call>', "",
     [("now", {"a": "x\n\ty\\d\\uZZ"})]),
    # no calls: kept as they are
    ("a <tool_call>\nnonsense</tool_call> b", "a <tool_call>\nnonsense</tool_call> b", []),
    ('<tool_call>{"nam', '<tool_call>{"nam', []),
    ("x <tool_ca", "x <tool_ca", []),
    ("\n\n  ", "\n\n  ", []),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content", "calls"), HERMES)
def test_hermes(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    _, said, made = every_cut(maker("hermes"), text)
    assert (said, values(made)) == (content, calls)


def test_a_cut_call_keeps_what_came() -> None:
    _, said, made = every_cut(maker("hermes"), 'x <tool_call>{"name": "get_weather", "arguments": {"city": "Kö')
    assert (said, made) == ("x", [("get_weather", '{"city": "Kö')])


def test_arguments_stream_as_they_come() -> None:
    parser = maker("hermes")()
    parts = [parser.feed(piece) for piece in ('<tool_call>{"name": "now", "arg', 'uments": {"a": "b', "c")]
    assert [len(each) for each in parts] == [1, 1, 1]
    assert parts[1][0][1] + parts[2][0][1] == '{"a": "bc'
