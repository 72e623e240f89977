"""Custom tools with a grammar, forced, through a real server at a high temperature: every call matches."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.model

PATTERN = r'"[a-z]{3,8}"\\[0-9]{2,4}(\n[A-Z]{1,5})?'
LARK = """start: "move " DIRECTION "\\n" step{1,3}
DIRECTION: "\\"north\\"" | "\\"south\\""
step: "step\\t" /[0-9]{1,2}/ "\\n"
"""
LARK_PATTERN = r'move "(?:north|south)"\n(?:step\t[0-9]{1,2}\n){1,3}'
PATTERNS = {"write": PATTERN, "walk": LARK_PATTERN}
HOT = {"temperature": 1.5, "max_tokens": 300}
USER = {"role": "user", "content": "Go north, then write a word."}


def grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


TOOLS = [
    {"type": "custom", "custom": {"name": "write", "format": grammar("regex", PATTERN)}},
    {"type": "custom", "custom": {"name": "walk", "format": grammar("lark", LARK)}},
]


def assert_calls(calls: list[tuple[str, str]]) -> None:
    assert calls
    for name, text in calls:
        assert re.fullmatch(PATTERNS[name], text), (name, text)


@pytest.mark.parametrize("seed", range(4))
def test_every_call_matches(http: httpx.Client, seed: int) -> None:
    name = "write" if seed % 2 else "walk"
    choice = "required" if seed < 2 else {"type": "custom", "custom": {"name": name}}
    body = HOT | {"messages": [USER], "tools": TOOLS, "tool_choice": choice, "seed": seed, "n": 4}
    answer = http.post("/v1/chat/completions", json=body | {"parallel_tool_calls": False})
    assert answer.status_code == 200, answer.text
    assert "x-pagemill-ignored" not in answer.headers
    for told in answer.json()["choices"]:
        assert told["finish_reason"] == "tool_calls"
        (call,) = told["message"]["tool_calls"]
        assert_calls([(call["custom"]["name"], call["custom"]["input"])])
        assert choice == "required" or call["custom"]["name"] == name


@pytest.mark.parametrize("seed", range(2))
def test_a_stream_says_the_same(http: httpx.Client, seed: int) -> None:
    body = HOT | {"messages": [USER], "tools": TOOLS, "tool_choice": "required", "seed": seed, "stream": True}
    body["parallel_tool_calls"] = False
    with http.stream("POST", "/v1/chat/completions", json=body) as response:
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    name, text = "", ""
    for chunk in map(json.loads, data[:-1]):
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            name = call["custom"].get("name") or name
            text += call["custom"].get("input") or ""
    assert_calls([(name, text)])


def test_responses(http: httpx.Client) -> None:
    tools = [
        {"type": "custom", "name": "walk", "format": {"type": "grammar", "syntax": "lark", "definition": LARK}},
        {"type": "web_search"},
    ]
    body = {"input": "Go.", "temperature": 1.5, "max_output_tokens": 300, "tools": tools, "tool_choice": "required"}
    answer = http.post("/v1/responses", json=body | {"parallel_tool_calls": False})
    assert answer.status_code == 200, answer.text
    calls = [item for item in answer.json()["output"] if item["type"] == "custom_tool_call"]
    assert_calls([(call["name"], call["input"]) for call in calls])
    tools[0]["format"] = {"type": "grammar", "syntax": "lark", "definition": "start: a"}
    refused = http.post("/v1/responses", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "tools[0].format.definition"
