"""The anthropic package: messages plain, streamed, async; tools, thinking, formats, counting; its exceptions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL

anthropic = pytest.importorskip("anthropic", reason="the anthropic package is not installed")

HELLO: Any = [{"role": "user", "content": "Say hello."}]
ASKED: Any = {"model": MODEL, "max_tokens": 24, "messages": HELLO, "extra_body": {"seed": 5}}
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 20},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
PERSON: Any = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture
def client(base_url: str) -> Any:
    with anthropic.Anthropic(base_url=base_url, api_key=KEY, max_retries=0) as client:
        yield client


def test_plain_and_streamed_are_equal(client: Any) -> None:
    plain = client.messages.create(**ASKED, system="You are kind.")
    with client.messages.stream(**ASKED, system="You are kind.") as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert plain.content[0].text == text == final.content[0].text
    assert plain.stop_reason == final.stop_reason
    assert plain.usage.output_tokens == final.usage.output_tokens
    assert final.usage.input_tokens + final.usage.cache_read_input_tokens == (
        plain.usage.input_tokens + plain.usage.cache_read_input_tokens
    )
    assert plain._request_id


def test_raw_events_come_in_order(client: Any) -> None:
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}


def test_stop_sequences_and_limits(client: Any) -> None:
    told = client.messages.create(**ASKED).content[0].text
    word = told.split()[1]
    stopped = client.messages.create(**ASKED, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in "".join(block.text for block in stopped.content)
    short = client.messages.create(**{**ASKED, "max_tokens": 2})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 2)


def test_prefill(client: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hello and"}]
    answer = client.messages.create(**{**ASKED, "messages": messages})
    assert not answer.content[0].text.startswith("Hello and")


def test_a_forced_tool_is_called_and_its_result_read(client: Any) -> None:
    choice = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    asked = {**ASKED, "max_tokens": 80, "tools": [WEATHER], "tool_choice": choice}
    plain = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    for message in (plain, final):
        call = message.content[-1]
        assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
        assert set(call.input) == {"city", "days"}
        assert isinstance(call.input["days"], int)
    assert plain.content[-1].input == final.content[-1].input
    result = {"type": "tool_result", "tool_use_id": plain.content[-1].id, "content": "12 C, rain", "is_error": False}
    messages = [*HELLO, {"role": "assistant", "content": plain.content}, {"role": "user", "content": [result]}]
    after = client.messages.create(**{**ASKED, "messages": messages}, tools=[WEATHER])
    assert after.usage.cache_read_input_tokens > 0


def test_a_form_is_kept(client: Any) -> None:
    output = {"format": {"type": "json_schema", "schema": PERSON}}
    answer = client.messages.create(**{**ASKED, "max_tokens": 80}, output_config=output)
    read = json.loads(answer.content[0].text)
    assert set(read) == {"name", "age"}


def test_thinking_and_hints_are_accepted(client: Any) -> None:
    raw = client.messages.with_raw_response.create(
        **{**ASKED, "max_tokens": 2000},
        thinking={"type": "enabled", "budget_tokens": 1024},
        metadata={"user_id": "u"},
        service_tier="auto",
        stop_sequences=["."],
        extra_headers={"anthropic-beta": "interleaved-thinking-2025-05-14"},
    )
    ignored = raw.headers["x-pagemill-ignored"].split(", ")
    assert sorted(ignored) == ["metadata", "service_tier", "thinking.budget_tokens"]
    assert raw.parse().role == "assistant"


def test_counting(client: Any) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=HELLO, system="You are kind.", tools=[WEATHER])
    usage = client.messages.create(**ASKED, system="You are kind.", tools=[WEATHER]).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert model.created_at.year >= 2025


def test_errors(client: Any, base_url: str) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(**{**ASKED, "model": "nothing"})
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        client.messages.create(**{**ASKED, "messages": []})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        client.messages.create(**{**ASKED, "messages": [{"role": "user", "content": "word " * 20_000}]})
    stranger = anthropic.Anthropic(base_url=base_url, api_key="sk-wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError) as refused:
        stranger.messages.create(**ASKED)
    assert refused.value.request_id


def test_async(base_url: str) -> None:
    async def run() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=base_url, auth_token=KEY, api_key=None, max_retries=0) as client:
            plain = await client.messages.create(**ASKED)
            async with client.messages.stream(**ASKED) as stream:
                text = "".join([text async for text in stream.text_stream])
        return plain.content[0].text, text

    plain, streamed = asyncio.run(run())
    assert plain == streamed
