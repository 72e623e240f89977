"""OpenAI's own Python client against the app."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from server.app import create_app
from server.settings import Settings
from tests.server.fake_engine import FakeEngine, says, small_tokenizer

TOKENIZER = small_tokenizer()
TEXT = "Hello wörld 😀"


@pytest_asyncio.fixture
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    engine = FakeEngine(says(TEXT, TOKENIZER), tokenizer=TOKENIZER, splits=random.Random(5))
    transport = httpx.ASGITransport(app=create_app(Settings(api_key=("key",)), engine))
    async with (
        httpx.AsyncClient(transport=transport) as http,
        openai.AsyncOpenAI(base_url="http://test/v1", api_key="key", http_client=http, max_retries=0) as sdk,
    ):
        yield sdk


async def test_models(client: openai.AsyncOpenAI) -> None:
    names = [model.id async for model in client.models.list()]
    assert names == ["fake-model"]
    assert (await client.models.retrieve("fake-model")).id == "fake-model"


async def test_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake-model", prompt=["a", "b"], n=2, max_tokens=40, logprobs=1)
    assert [choice.text for choice in answer.choices] == [TEXT] * 4
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4 * len(answer.choices[0].logprobs.tokens or ())
    stream = await client.completions.create(model="fake-model", prompt="a", max_tokens=40, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == TEXT


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="fake-model",
        messages=[{"role": "developer", "content": "d"}, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
        logprobs=True,
        top_logprobs=1,
        metadata={"a": "b"},
        extra_body={"top_k": 5},
    )
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2
    async with client.chat.completions.stream(
        model="fake-model", messages=[{"role": "user", "content": "a"}], stream_options={"include_usage": True}
    ) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.usage.completion_tokens == answer.usage.completion_tokens


async def test_errors(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model="fake-model", prompt="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.completions.create(model="other", prompt="a")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
