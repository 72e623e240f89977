"""A coding agent's session over /v1/responses with the real engine: every turn prefills only what is new."""

from __future__ import annotations

from typing import Any

import openai
import pytest

pytestmark = pytest.mark.model

NUM_TURNS = 20
BLOCK = 16
INSTRUCTIONS = "You are a coding agent. Be brief."
SHELL = {
    "type": "function",
    "name": "shell",
    "parameters": {
        "type": "object",
        "properties": {"command": {"type": "string", "maxLength": 8}},
        "required": ["command"],
        "additionalProperties": False,
    },
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
WISH: dict[str, Any] = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]}
CHOICES: list[Any] = [{"type": "function", "name": "shell"}, "auto", "required"]


def body(k: int, items: list[Any], **more: Any) -> dict[str, Any]:
    """The k-th request, as Codex makes it; the choice of tools makes a small model call them too."""
    return {
        "model": "demo",
        "instructions": INSTRUCTIONS,
        "input": items,
        "tools": [SHELL, PATCH, {"type": "web_search"}],
        "tool_choice": CHOICES[k % len(CHOICES)],
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199a213",
        "temperature": 0,
        "max_output_tokens": 8 if k % 3 == 1 else 30,  # words may be cut, calls seldom are
        "store": False,
    } | more


def ask(sdk: openai.OpenAI, fields: dict[str, Any]) -> Any:
    """The final response of a streamed answer."""
    final = None
    with sdk.responses.create(**fields, stream=True) as stream:
        for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                final = event.response
    assert final is not None
    return final


def answers(final: Any) -> list[dict[str, Any]]:
    """What the client did for the calls; a new wish where there was none."""
    calls = [item for item in final.output if item.type.endswith("_call")]
    done = [{"type": f"{call.type}_output", "call_id": call.call_id, "output": "ok"} for call in calls]
    return done or [WISH]


@pytest.mark.parametrize("by_id", [False, True])
def test_every_turn_prefills_only_what_is_new(sdk: openai.OpenAI, by_id: bool) -> None:
    history: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Ask before you write."}]},
        {**WISH, "content": [{"type": "input_text", "text": f"List the files of project {int(by_id)}."}]},
    ]
    model = sdk.models.list().data[0].id
    known, calls, previous, new = 0, 0, None, history
    for k in range(NUM_TURNS):
        fields = body(k, new if by_id else history, model=model)
        if by_id:
            fields |= {"store": True, "previous_response_id": previous}
        final = ask(sdk, fields)
        assert final.usage.input_tokens_details.cached_tokens >= known // BLOCK * BLOCK
        known = final.usage.input_tokens - 1
        previous = final.id
        calls += sum(item.type.endswith("_call") for item in final.output)
        new = answers(final)
        history += [*(item.model_dump(exclude_none=True, exclude={"id"}) for item in final.output), *new]
    assert calls >= NUM_TURNS // 2
