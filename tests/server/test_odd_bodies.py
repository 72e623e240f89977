"""Any value in any place of a body: 200 or 400 with a reason, never a failure of ours."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.fake_engine import FakeEngine, says
from tests.server.harness import client_of
from tests.server.test_conversation import CUSTOM, SCHEMA, TOKENIZER, WEATHER, call_text

CALL = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "x"}'}}
TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
    {"role": "assistant", "content": "b", "reasoning_content": "r", "tool_calls": [CALL]},
    {"role": "tool", "content": "c", "tool_call_id": "c"},
]
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": TALK, "tools": [WEATHER, CUSTOM], "tool_choice": {"type": "function", "function": {
            "name": "get_weather"}}, "parallel_tool_calls": False, "n": 2, "seed": 1, "stop": ["x"], "top_k": 1,
        "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}, "reasoning_effort": "low", "max_tokens": 9,
        "stream": True, "stream_options": {"include_usage": True}, "chat_template_kwargs": {"enable_thinking": True},
        "response_format": FORM, "metadata": {"a": "b"}, "modalities": ["text"], "temperature": 0.5, "top_p": 0.9,
    },
    "/v1/completions": {
        "prompt": ["a", "b"], "n": 2, "best_of": 2, "echo": True, "logprobs": 2, "stop": "x", "max_tokens": 9,
        "logit_bias": {"5": 1}, "structured_outputs": {"choice": ["a"]}, "cache_salt": "s", "min_p": 0.1,
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {
            "type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}, {
            "type": "function_call_output", "call_id": "c", "output": "x"}],
        "instructions": "i", "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}], "tool_choice": "auto",
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "store": True, "stream": True,
        "metadata": {"a": "b"}, "max_output_tokens": 20, "include": ["x"],
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t", "content": "r"}]}],
        "system": [{"type": "text", "text": "s"}], "max_tokens": 9, "stop_sequences": ["x"], "stream": True,
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "u"},
    },
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "float", "user": "u"},
    "/tokenize": {"prompt": "a", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2]},
}  # fmt: skip
ODD: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**30, -(2**63), 1e308, "", "x", "\x00", "\ud7ff\U0010ffff", "<|im_end|>",
    "y" * 5000, [], {}, [None], [[]], [{}], {"": None}, {"type": "function"}, {"type": "text"}, {"role": "user"},
    {"$ref": "#"}, [0] * 40,
]  # fmt: skip
DEPTHS = (100, 129, 200, 300, 900)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"type": "object", "properties": {"a": value}} if depth % 2 else [value]
    return value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*path, key))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    inner: Any = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return body


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
async def test_odd_values(path: str, data: st.DataObject) -> None:
    body = BODIES[path]
    for _ in range(data.draw(st.integers(0, 2))):
        place = data.draw(st.sampled_from(sorted(places(body), key=repr)))
        body = changed(body, place, data.draw(st.sampled_from(ODD)))
    engine = FakeEngine(says("<think>a</think>b" + call_text(), TOKENIZER), tokenizer=TOKENIZER, max_model_len=4096)
    async with client_of(engine) as client:
        response = await client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 200 and body.get("stream"):
        assert "server_error" not in response.text
        assert "api_error" not in response.text
    if response.status_code >= 400:
        error = response.json()["error"]
        assert error["message"].rstrip().endswith((".", "?", ")")) or path == "/v1/messages"
        assert len(error["message"]) < 500
        assert ".py" not in error["message"]


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
async def test_deep_values(path: str, data: st.DataObject) -> None:
    """Also as JSON inside a string, where arguments are read that way."""
    body = BODIES[path]
    place = data.draw(st.sampled_from(sorted(places(body), key=repr)))
    deep = nested(data.draw(st.sampled_from(DEPTHS)))
    body = changed(body, place, json.dumps(deep) if data.draw(st.booleans()) else deep)
    engine = FakeEngine(says("a", TOKENIZER), tokenizer=TOKENIZER, max_model_len=1 << 16)
    async with client_of(engine) as client:
        response = await client.post(path, content=json.dumps(body).encode())
    assert response.status_code in (200, 400), response.text


@pytest.mark.parametrize(
    ("path", "field", "wanted"),
    [
        ("/v1/chat/completions", "tool_choice", "a string or an object"),
        ("/v1/responses", "input", "a string or an array"),
        ("/v1/responses", "tool_choice", "a string or an object"),
    ],
)
async def test_a_field_of_several_types_is_named_once(path: str, field: str, wanted: str) -> None:
    async with client_of(FakeEngine(says("a", TOKENIZER), tokenizer=TOKENIZER)) as client:
        error = (await client.post(path, json=BODIES[path] | {field: True})).json()["error"]
    assert error["param"] == field
    assert error["message"] == f"{field} must be {wanted}, got true."


async def test_a_body_of_nothing_but_brackets_is_not_parsed() -> None:
    async with client_of(FakeEngine(says("a", TOKENIZER), tokenizer=TOKENIZER)) as client:
        answer = await client.post("/v1/completions", content=b'{"x":[' + b"[]," * 300_000 + b'[]],"prompt":"a"}')
    assert answer.status_code == 400
    assert "brackets" in answer.json()["error"]["message"]
