"""The openai package: completions, chat, responses, embeddings; plain, streamed, async; errors as its exceptions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.clients.conftest import KEY, MODEL

openai = pytest.importorskip("openai", reason="the openai package is not installed")

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
HELLO: Any = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(v1: str) -> Any:
    with openai.OpenAI(base_url=v1, api_key=KEY, max_retries=0) as client:
        yield client


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nothing")
    assert missing.value.code == "model_not_found"


def test_completion_plain_and_streamed_are_equal(client: Any) -> None:
    wanted = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    plain = client.completions.create(**wanted)
    chunks = list(client.completions.create(**wanted, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == plain.choices[0].text
    assert chunks[-1].usage == plain.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )
    assert plain.usage.completion_tokens == 24


def test_scoring(client: Any) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="The capital of France is Paris", echo=True, logprobs=1, max_tokens=0
    )
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "The capital of France is Paris"
    assert answer.usage.completion_tokens == 0
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert "".join(logprobs.tokens) == answer.choices[0].text


def test_chat_with_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=HELLO, max_completion_tokens=8, logprobs=True, top_logprobs=3, temperature=0
    )
    entries = answer.choices[0].logprobs.content
    assert len(entries) == answer.usage.completion_tokens
    assert all(len(entry.top_logprobs) == 3 for entry in entries)


def test_chat_stream_helper(client: Any) -> None:
    with client.chat.completions.stream(model=MODEL, messages=HELLO, temperature=0) as stream:
        texts = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(texts) == final.choices[0].message.content


def test_json_schema(client: Any) -> None:
    for stream in (False, True):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "Invent a person."}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "strict": True, "schema": PERSON},
            },
            max_completion_tokens=200,
            stream=stream,
        )
        text = (
            "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)
            if stream
            else answer.choices[0].message.content
        )
        person = json.loads(text)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_forced_tool_call(client: Any, choice: Any) -> None:
    asked = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the weather in Paris for 2 days?"}],
        "tools": [WEATHER],
        "tool_choice": choice,
        "max_completion_tokens": 200,
        "seed": 1,
    }
    call = client.chat.completions.create(**asked).choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert set(json.loads(call.function.arguments)) == {"city", "days"}
    name, arguments = "", ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        for part in chunk.choices[0].delta.tool_calls or [] if chunk.choices else []:
            if part.index == 0:
                name += part.function.name or ""
                arguments += part.function.arguments or ""
    assert (name, arguments) == (call.function.name, call.function.arguments)


def test_tool_results_go_back(client: Any) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "What is the weather in Paris?"},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "get_weather", "arguments": '{"city": "Paris", "days": 1}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "Sunny, 21 degrees."},
        ],
        max_completion_tokens=16,
    )
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_responses(client: Any) -> None:
    first = client.responses.create(model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0)
    assert first.output_text
    again = client.responses.create(
        model=MODEL, input="And again.", previous_response_id=first.id, max_output_tokens=16
    )
    assert again.previous_response_id == first.id
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_responses_stream(client: Any) -> None:
    kinds, text = [], ""
    for event in client.responses.create(
        model=MODEL, input="Say hello.", max_output_tokens=16, temperature=0, stream=True
    ):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert text == event.response.output_text


def test_embeddings(client: Any) -> None:
    answer = client.embeddings.create(model=MODEL, input=["one text", "another text"])
    assert [item.index for item in answer.data] == [0, 1]
    assert len(answer.data[0].embedding) == len(answer.data[1].embedding) > 100


def test_bad_requests_are_exceptions(client: Any, v1: str) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=v1, api_key="wrong", max_retries=0).models.list()
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="a " * 20_000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"


async def test_async_streams_side_by_side(v1: str) -> None:
    async with openai.AsyncOpenAI(base_url=v1, api_key=KEY) as client:

        async def one(seed: int) -> str:
            stream = await client.chat.completions.create(
                model=MODEL, messages=HELLO, max_completion_tokens=16, seed=seed, stream=True
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

        together = [await task for task in [asyncio.ensure_future(one(seed)) for seed in range(8)]]
        assert together[3] == await one(3)
