"""A coding agent's session as Codex sends it: nothing stored, the whole history with every request, thinking handed
back sealed. Every turn must compute only what is new; so must one that continues by previous_response_id. A strict
server refuses nothing of it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.server.agent_engine import BLOCK, AgentEngine, turn
from tests.server.harness import client_of
from tests.server.responses_harness import check, events_of

NUM_TURNS = 20
INSTRUCTIONS = "You are a coding agent. " + "Be careful with the files of the user. " * 20
SHELL = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "array", "items": {"type": "string"}}, "timeout_ms": {"type": "number"}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" LF'},
}
SERVERS = {"type": "namespace", "name": "mcp", "description": "Servers.", "tools": [SHELL | {"name": "query"}]}
BODY = {
    "model": "fake-model",
    "instructions": INSTRUCTIONS,
    "tools": [SHELL, PATCH, SERVERS, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199a213-81c0-7800-8aa1-bbab2a035a53",
    "text": {"verbosity": "medium"},
    "client_metadata": {"x-codex-installation-id": "3"},
}
OPENING = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>ask"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "# AGENTS.md\nTabs."}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
]


def said(k: int) -> str:
    """The model's k-th turn, of every kind."""
    thinking = f"Step {k} <é> needs thought.\nA second line." if k % 5 != 4 else ""
    shell = ("shell", {"command": ["sed", "-n", f"{k}p", 'a "b".py'], "timeout_ms": 1000 + k})
    patch = (
        "apply_patch",
        {"input": f'*** Begin Patch\n*** Update File: f{k}.py\n-\ta\n+\tb \\ "c"\n*** End Patch\n'},
    )
    query = ("mcp__query", {"command": []})
    calls = [[shell], [patch], [shell, patch, query], [query], []][k % 5]
    return turn(f"I do step {k}." if k % 2 else "", thinking=thinking, calls=calls) or "Done so far."


def as_codex_keeps(item: dict[str, Any]) -> dict[str, Any]:
    """Without ids; of the thinking only what is sealed."""
    kept = {key: value for key, value in item.items() if key not in ("id", "status")}
    return kept | {"content": None} if item["type"] == "reasoning" else kept


def whole(item: dict[str, Any]) -> dict[str, Any]:
    return item


def outputs(final: dict[str, Any]) -> list[dict[str, Any]]:
    """What the client did for the calls of a turn; a new wish where there was none."""
    calls = [item for item in final["output"] if item["type"].endswith("_call")]
    made = [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "exit 0\nok"} for call in calls]
    return made or [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}]


async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    return check(events_of(response.text))


def num_known(usage: dict[str, Any]) -> int:
    """Tokens in whole blocks whose keys and values are there after an answer; the last one's are not."""
    known: int = usage["input_tokens"] + usage["output_tokens"] - 1
    return known // BLOCK * BLOCK


@pytest.mark.parametrize("keep", [as_codex_keeps, whole])
async def test_the_whole_history_each_turn(keep: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    engine = AgentEngine([said(k) for k in range(NUM_TURNS)], splits=random.Random(1))
    history: list[dict[str, Any]] = list(OPENING)
    known = 0
    async with client_of(engine, strict_fields=True) as client:
        for _ in range(NUM_TURNS):
            final = await ask(client, BODY | {"input": history})
            assert final["usage"]["input_tokens_details"]["cached_tokens"] == known
            known = num_known(final["usage"])
            history += [keep(item) for item in final["output"]] + outputs(final)
    kinds = {item["type"] for item in history}
    assert kinds >= {"reasoning", "function_call", "custom_tool_call", "custom_tool_call_output", "message"}


async def test_by_previous_response() -> None:
    engine = AgentEngine([said(k) for k in range(NUM_TURNS)], splits=random.Random(2))
    body: dict[str, Any] = {**BODY, "store": True, "input": OPENING}
    known = 0
    async with client_of(engine, strict_fields=True) as client:
        for _ in range(NUM_TURNS):
            final = await ask(client, body)
            assert final["usage"]["input_tokens_details"]["cached_tokens"] == known
            known = num_known(final["usage"])
            body = {**BODY, "store": True, "previous_response_id": final["id"], "input": outputs(final)}
