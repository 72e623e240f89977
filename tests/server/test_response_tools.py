"""Tools of /v1/responses: as functions and back, dropped and chosen."""

from __future__ import annotations

from typing import Any

import pytest

from server.protocol.errors import InvalidRequest
from server.protocol.response_tools import Origin, Tools

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
FILES = {
    "type": "namespace",
    "name": "files",
    "description": "Files of the user.",
    "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}, {"type": "custom", "name": "write"}],
}
SEARCH = {"type": "web_search", "search_context_size": "low"}
EVERYTHING = [WEATHER, PATCH, SEARCH, FILES]


def names(functions: list[dict[str, Any]]) -> list[str]:
    return [function[function["type"]]["name"] for function in functions]


def test_functions_for_the_template() -> None:
    tools = Tools(EVERYTHING)
    assert names(tools.for_chat) == ["weather", "apply_patch", "files__read", "files__write"]
    weather, patch, read, _ = (tool[tool["type"]] for tool in tools.for_chat)
    assert weather == {"name": "weather", "description": "d", "parameters": SCHEMA, "strict": True}
    assert patch["format"] == {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    assert read["description"] == "Files of the user."
    assert tools.dropped == ["tools.web_search"]
    assert [tool["type"] for tool in tools.echoed] == ["function", "custom", "namespace"]


def test_the_way_back() -> None:
    tools = Tools(EVERYTHING)
    assert tools.origin("weather") == Origin("weather")
    assert tools.origin("apply_patch") == Origin("apply_patch", custom=True)
    assert tools.origin("files__read") == Origin("read", "files")
    assert tools.origin("files__write") == Origin("write", "files", custom=True)
    assert tools.origin("invented") == Origin("invented")


@pytest.mark.parametrize(
    ("choice", "chosen", "left"),
    [
        (None, None, 4),
        ("auto", "auto", 4),
        ("none", "none", 4),
        ("required", "required", 4),
        ({"type": "function", "name": "weather"}, "weather", 4),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch", 4),
        ({"type": "function", "name": "read"}, "files__read", 4),
        ({"type": "function", "name": "read", "namespace": "files"}, "files__read", 4),
        ({"type": "function", "name": "files__read"}, "files__read", 4),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}, "auto", 1),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "custom", "name": "write"}, {"type": "function", "name": "weather"}],
            },
            "required",
            2,
        ),
    ],
)
def test_choices(choice: Any, chosen: str | None, left: int) -> None:
    got, functions = Tools(EVERYTHING).choose(choice)
    assert len(functions) == left
    assert (got[got["type"]]["name"] if isinstance(got, dict) else got) == chosen


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("sometimes", "tool_choice"),
        ({"type": "web_search_preview"}, "tool_choice"),
        ({"type": "web_search"}, "tool_choice"),
        ({"type": "mcp", "server_label": "x"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "name": "nothing"}, "tool_choice.name"),
        ({"type": "function", "name": "read", "namespace": "other"}, None),
        ({"type": 5}, "tool_choice.type"),
        ({}, "tool_choice.type"),
        ({"type": "allowed_tools", "mode": "none", "tools": []}, "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": ["x"]}, "tool_choice.tools[0]"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "tool_choice.tools[0]"),
    ],
)
def test_refused_choices(choice: Any, param: str | None) -> None:
    if param is None:  # the bare name is enough where only one tool has it
        assert Tools(EVERYTHING).choose(choice)[0] == {"type": "function", "function": {"name": "files__read"}}
        return
    with pytest.raises(InvalidRequest) as refused:
        Tools(EVERYTHING).choose(choice)
    assert refused.value.param == param


def test_required_needs_a_tool_that_can_run() -> None:
    with pytest.raises(InvalidRequest) as refused:
        Tools([SEARCH]).choose("required")
    assert "web_search" in refused.value.message
    assert Tools([SEARCH]).choose("auto") == ("auto", [])


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({}, "tools[0].type"),
        ({"type": 7}, "tools[0].type"),
        ({"type": "function"}, "tools[0].name"),
        ({"type": "function", "function": {"name": "f"}}, "tools[0].name"),
        ({"type": "function", "name": 5}, "tools[0].name"),
        ({"type": "function", "name": "f", "parameters": "x"}, "tools[0].parameters"),
        ({"type": "function", "name": "f", "description": 3}, "tools[0].description"),
        ({"type": "custom", "name": "c", "format": {"type": "yaml"}}, "tools[0].format.type"),
        ({"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "bnf"}}, "tools[0].format"),
        ({"type": "namespace", "name": "n"}, "tools[0].tools"),
        ({"type": "namespace", "name": "n", "tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
    ],
)
def test_refused_tools(tool: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        Tools([tool])
    assert refused.value.param == param


def test_two_tools_of_one_name() -> None:
    with pytest.raises(InvalidRequest) as refused:
        Tools([WEATHER, PATCH | {"name": "weather"}])
    assert refused.value.param == "tools[1].name"
