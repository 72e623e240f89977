"""An explicit null is as if the field were absent: it takes its default, or is missed."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic_core import PydanticUndefined

from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.embeddings import EmbeddingRequest
from server.protocol.fields import WireModel
from server.protocol.messages import MessagesRequest
from server.protocol.responses import ResponsesRequest
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tests.server.agent_engine import AgentEngine, turn
from tests.server.harness import client_of

USER = {"role": "user", "content": "Hi."}
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
BODIES: list[tuple[str, type[WireModel], dict[str, Any]]] = [
    ("/v1/completions", CompletionRequest, {"prompt": "a"}),
    (CHAT, ChatRequest, {"messages": [USER]}),
    (RESPONSES, ResponsesRequest, {"input": "a"}),
    (MESSAGES, MessagesRequest, {"messages": [USER], "max_tokens": 5}),
    ("/v1/messages/count_tokens", MessagesRequest, {"messages": [USER]}),
    ("/v1/embeddings", EmbeddingRequest, {"input": "a"}),
    ("/tokenize", TokenizeRequest, {"prompt": "a"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [1]}),
]


def engine() -> AgentEngine:
    return AgentEngine([turn("Hello.")])


@pytest.mark.parametrize(("path", "model", "body"), BODIES)
async def test_all_nulls(path: str, model: type[WireModel], body: dict[str, Any]) -> None:
    nulls = dict.fromkeys((*model.model_fields, *model.hints, "odd"))
    async with client_of(engine(), strict_fields=True) as client:
        answer = await client.post(path, json=nulls | body)
    assert answer.status_code == 200, answer.text
    assert "x-pagemill-ignored" not in answer.headers


@pytest.mark.parametrize(("path", "model", "body"), BODIES)
async def test_what_is_needed_is_missed(path: str, model: type[WireModel], body: dict[str, Any]) -> None:
    required = [name for name, info in model.model_fields.items() if info.default is PydanticUndefined]
    async with client_of(engine()) as client:
        for name in required:
            absent = await client.post(path, json={key: value for key, value in body.items() if key != name})
            null = await client.post(path, json=body | {name: None})
            assert absent.status_code == null.status_code == 400
            assert absent.json()["error"] == null.json()["error"]
            assert absent.json()["error"]["message"].startswith(f"You must provide the parameter {name}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER | {"name": None, "tool_calls": None}],
                "tools": [{"type": None, "function": {"name": "f", "description": None, "parameters": None,
                                                      "strict": None}, "custom": None}],
                "tool_choice": {"type": None, "function": {"name": "f"}}}),
        (RESPONSES, {"input": [USER | {"id": None, "status": None, "type": None},
                               {"type": "reasoning", "id": None, "summary": None, "content": None,
                                "encrypted_content": None},
                               {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}",
                                "namespace": None},
                               {"type": "function_call_output", "call_id": "c", "output": "x", "id": None}],
                     "tools": [{"type": "function", "name": "f", "description": None, "parameters": None,
                                "strict": None}, {"type": "custom", "name": "c", "format": None}],
                     "tool_choice": {"type": "allowed_tools", "mode": None,
                                     "tools": [{"type": "function", "name": "f", "namespace": None}]},
                     "metadata": {"a": None, "b": "c"}, "text": {"format": None, "verbosity": None},
                     "reasoning": {"effort": None, "summary": None}}),
        (MESSAGES, {"max_tokens": 5, "messages": [
                        {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None,
                                                      "citations": None}]},
                        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {},
                                                           "caller": None}]},
                        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": None,
                                                      "is_error": None}]}],
                    "tools": [{"type": None, "name": "f", "description": None, "input_schema": {}, "strict": None}],
                    "tool_choice": {"type": "auto", "name": None, "disable_parallel_tool_use": None},
                    "thinking": {"type": "disabled", "display": None, "budget_tokens": None},
                    "output_config": {"effort": None, "format": None}}),
    ],
)  # fmt: skip
async def test_nulls_inside(path: str, body: dict[str, Any]) -> None:
    async with client_of(engine(), strict_fields=True) as client:
        answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    assert "x-pagemill-ignored" not in answer.headers
    if path == RESPONSES:
        assert answer.json()["metadata"] == {"b": "c"}
