"""openai-agents over /v1/responses: a tool's round trip, streamed too, and an answer as an object."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.clients.conftest import KEY, MODEL

agents = pytest.importorskip("agents", reason="openai-agents is not installed")
openai = pytest.importorskip("openai", reason="openai is not installed")


class Person(BaseModel, extra="forbid"):
    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)


@pytest.fixture
def model(v1: str) -> Any:
    agents.set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=v1, api_key=KEY, max_retries=0)
    return agents.OpenAIResponsesModel(model=MODEL, openai_client=client)


def weather_agent(model: Any, asked: list[str]) -> Any:
    """An agent that must call its tool first; `asked` tells what with."""

    @agents.function_tool
    def get_weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "sunny"

    settings = agents.ModelSettings(tool_choice="required", max_tokens=64, temperature=0, parallel_tool_calls=False)
    return agents.Agent(name="w", instructions="Be brief.", model=model, tools=[get_weather], model_settings=settings)


async def test_a_tool_is_called_and_answered(model: Any) -> None:
    asked: list[str] = []
    result = await agents.Runner.run(weather_agent(model, asked), "The weather in Paris?", max_turns=4)
    assert asked
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"]
    assert result.raw_responses[0].usage.total_tokens > 0
    again = await agents.Runner.run(
        agents.Agent(name="w", model=model, model_settings=agents.ModelSettings(max_tokens=8)),
        [*result.to_input_list(), {"role": "user", "content": "Thanks."}],
    )
    assert isinstance(again.final_output, str)


async def test_streamed(model: Any) -> None:
    asked: list[str] = []
    result = agents.Runner.run_streamed(weather_agent(model, asked), "The weather in Paris?", max_turns=4)
    kinds = {event.data.type async for event in result.stream_events() if event.type == "raw_response_event"}
    assert asked
    assert {"response.created", "response.function_call_arguments.delta", "response.output_item.done"} <= kinds


async def test_an_object(model: Any) -> None:
    agent = agents.Agent(
        name="p", model=model, output_type=Person, model_settings=agents.ModelSettings(max_tokens=128, temperature=0)
    )
    result = await agents.Runner.run(agent, "Invent a person.")
    assert isinstance(result.final_output, Person)


async def test_by_previous_response(model: Any) -> None:
    agent = agents.Agent(name="c", model=model, model_settings=agents.ModelSettings(max_tokens=8, store=True))
    first = await agents.Runner.run(agent, "Say hello.")
    second = await agents.Runner.run(agent, "Again.", previous_response_id=first.last_response_id)
    assert second.raw_responses[0].usage.input_tokens > first.raw_responses[0].usage.input_tokens
