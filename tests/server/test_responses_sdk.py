"""OpenAI's own Python client against /v1/responses: sync and async, streams, tools, parsed objects."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

from server.app import create_app
from server.settings import Settings
from tests.server.agent_engine import AgentEngine, turn
from tests.server.harness import eventually

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
PATCH: Any = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
MODEL = "fake-model"


class Colour(BaseModel):
    name: str
    rgb: list[int]


def sdk(engine: AgentEngine) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(app=create_app(Settings(api_key=("key",)), engine))
    http = httpx.AsyncClient(transport=transport)
    return openai.AsyncOpenAI(base_url="http://test/v1", api_key="key", http_client=http, max_retries=0)


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[openai.AsyncOpenAI]:
    """Says: two calls, then what came of them."""
    calls = turn(
        "I look.", thinking="Where?", calls=[("weather", {"city": "Rom"}), ("apply_patch", {"input": "+ \"a\"\n"})]
    )  # fmt: skip
    async with sdk(AgentEngine([calls, turn("12 degrees.", thinking="So.")], splits=random.Random(4))) as client:
        yield client


async def test_a_loop_of_tools(agent: openai.AsyncOpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": "How warm is it in Rom?"}]
    first = await agent.responses.create(model=MODEL, input=items, tools=[WEATHER, PATCH], store=False)
    thought, spoke, call, patch = first.output
    assert thought.type == "reasoning"
    assert spoke.type == "message"
    assert first.output_text == "I look."
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"city": "Rom"}
    assert patch.type == "custom_tool_call"
    assert patch.input == '+ "a"\n'
    items += first.output
    items += [
        {"type": "function_call_output", "call_id": call.call_id, "output": "12 C"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
    ]
    second = await agent.responses.create(model=MODEL, input=items, tools=[WEATHER, PATCH], store=False)
    assert second.output_text == "12 degrees."
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens - 16
    assert second.usage.output_tokens_details.reasoning_tokens > 0


async def test_a_stream_gathered_by_the_client(agent: openai.AsyncOpenAI) -> None:
    kinds = []
    async with agent.responses.stream(model=MODEL, input="How warm?", tools=[WEATHER, PATCH]) as stream:
        async for event in stream:
            kinds.append(event.type)
        final = await stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.custom_tool_call_input.delta"} <= set(kinds)
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "custom_tool_call"]
    kept = await agent.responses.retrieve(final.id)
    assert kept.output_text == final.output_text == "I look."
    assert kept.usage == final.usage


async def test_by_previous_response(agent: openai.AsyncOpenAI) -> None:
    first = await agent.responses.create(model=MODEL, input="How warm?", tools=[WEATHER])
    call = first.output[2]
    assert call.type == "function_call"
    second = await agent.responses.create(
        model=MODEL,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "12 C"}],
        tools=[WEATHER],
    )
    assert second.output_text == "12 degrees."
    listed = [item async for item in agent.responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in listed] == [
        "message", "reasoning", "message", "function_call", "function_call", "function_call_output",
    ]  # fmt: skip
    await agent.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        await agent.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError):
        await agent.responses.cancel(second.id)
    with pytest.raises(openai.BadRequestError) as lost:
        await agent.responses.create(model=MODEL, previous_response_id=first.id, input="x")
    assert lost.value.code == "previous_response_not_found"
    counted = await agent.responses.input_tokens.count(model=MODEL, input="How warm?")
    assert counted.input_tokens > 0


async def test_parsed_into_a_class() -> None:
    engine = AgentEngine(['{"name": "red", "rgb": [255, 0, 0]}'])
    async with sdk(engine) as client:
        parsed = await client.responses.parse(model=MODEL, input="A colour.", text_format=Colour)
        async with client.responses.stream(model=MODEL, input="A colour.", text_format=Colour) as stream:
            final = await stream.get_final_response()
    assert parsed.output_parsed == final.output_parsed == Colour(name="red", rgb=[255, 0, 0])
    structured = engine.admitted[0].params.structured
    assert structured is not None
    assert json.loads(structured.source)["required"] == ["name", "rgb"]


async def test_a_stream_that_fails_raises() -> None:
    engine = AgentEngine(["a long answer"])
    engine.fail_after = 3
    async with sdk(engine) as client:
        stream = await client.responses.create(model=MODEL, input="x", stream=True)
        with pytest.raises(openai.APIError, match="failed inside the engine"):
            async for _ in stream:
                pass


WORDS = "one two three four five six seven eight nine ten " * 4


async def polled(client: openai.AsyncOpenAI, id: str) -> Response:
    """As OpenAI's guide does it."""
    response = await client.responses.retrieve(id)
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.005)
        response = await client.responses.retrieve(id)
    return response


async def test_in_the_background() -> None:
    async with sdk(AgentEngine([WORDS], pause_s=0.001)) as client:
        made = await client.responses.create(model=MODEL, input="Count.", background=True)
        assert made.status == "queued"
        assert made.background
        final = await polled(client, made.id)
        assert (final.status, final.output_text) == ("completed", WORDS)
        assert (await client.responses.cancel(made.id)).output_text == WORDS


async def test_cancelled_in_the_background() -> None:
    engine = AgentEngine([WORDS], pause_s=0.01)
    async with sdk(engine) as client:
        made = await client.responses.create(model=MODEL, input="Count.", background=True)
        for _ in range(2):
            cancelled = await client.responses.cancel(made.id)
            assert (cancelled.id, cancelled.status) == (made.id, "cancelled")
        assert (await polled(client, made.id)).status == "cancelled"
        assert engine.closed == [1]


async def test_a_background_stream_taken_up_again() -> None:
    async with sdk(AgentEngine([WORDS], pause_s=0.001)) as client:
        created = client.responses.create(model=MODEL, input="Count.", background=True, stream=True)
        events = [event async for event in await created]
        first = events[0]
        assert first.type == "response.created"
        for cut in (0, 5, len(events) - 2):
            again = await client.responses.retrieve(first.response.id, stream=True, starting_after=cut)
            assert [event async for event in again] == events[cut + 1 :]
        async with client.responses.stream(response_id=first.response.id, starting_after=7) as stream:
            assert [event.sequence_number async for event in stream] == list(range(8, len(events)))
            final = await stream.get_final_response()
        assert final.output_text == WORDS


async def test_a_stream_that_is_cancelled() -> None:
    engine = AgentEngine([WORDS], pause_s=0.01)
    async with sdk(engine) as client:

        async def read() -> list[ResponseStreamEvent]:
            return [event async for event in await client.responses.create(model=MODEL, input="Count.", stream=True)]

        reading = asyncio.create_task(read())
        await eventually(lambda: engine.num_delivered_tokens > 10)
        (id,) = engine_labels(engine)
        cancelled = await client.responses.cancel(id)
        last = (await reading)[-1]
        assert last.type == "response.failed"
        assert last.response.status == cancelled.status == "cancelled"
        assert last.response.output_text == cancelled.output_text
        assert WORDS.startswith(cancelled.output_text)


def engine_labels(engine: AgentEngine) -> list[str]:
    """The ids of the responses it was asked for: a request is called as its answer is."""
    return [admitted.label for admitted in engine.admitted]
