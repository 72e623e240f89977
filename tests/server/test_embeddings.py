"""POST /v1/embeddings: inputs, forms of the vector, limits, failures, and OpenAI's own client."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import httpx
import openai
import pytest

from engine.outputs import Phase, QueueFull
from engine.sampling_params import SamplingParams
from engine.stream import GenerationStream
from server.protocol.embeddings import MAX_INPUTS
from server.routes import embeddings
from tests.server.fake_engine import FakeEngine
from tests.server.harness import client_of, error_of, eventually

PATH = "/v1/embeddings"


def engine_of(**options: Any) -> FakeEngine:
    return FakeEngine(lambda prompt, p, c: [], **options)


async def ask(engine: FakeEngine, body: dict[str, Any], **settings: Any) -> httpx.Response:
    async with client_of(engine, **settings) as client:
        return await client.post(PATH, json=body)


def raw(*prompt: int) -> list[float]:
    """What the fake engine makes of a prompt."""
    return [float(len(prompt)), float(prompt[0]), float(prompt[-1]), -1.0]


def unit(vector: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in vector))
    return [x / length for x in vector]


async def test_one_text_becomes_one_vector_of_length_one() -> None:
    engine = engine_of()
    response = await ask(engine, {"input": "abc", "model": "fake-model"})
    assert response.status_code == 200
    body = response.json()
    prompt = engine.admitted[0].prompts[0]
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": pytest.approx(unit(raw(*prompt)), abs=1e-6)}],
        "model": "fake-model",
        "usage": {"prompt_tokens": len(prompt), "total_tokens": len(prompt)},
    }
    assert engine.admitted[0].params == SamplingParams(max_tokens=0, pooling="last")


@pytest.mark.parametrize(
    ("given", "prompts"),
    [([5, 6, 7], [(5, 6, 7)]), ([[5, 6], [7]], [(5, 6), (7,)]), ([[9]], [(9,)])],
)
async def test_token_ids(given: Any, prompts: list[tuple[int, ...]]) -> None:
    engine = engine_of()
    response = await ask(engine, {"input": given, "normalize": False})
    data = response.json()["data"]
    assert [item["embedding"] for item in data] == [raw(*prompt) for prompt in prompts]
    assert [item["index"] for item in data] == list(range(len(prompts)))
    assert response.json()["usage"]["total_tokens"] == sum(map(len, prompts))


async def test_base64_holds_the_same_numbers() -> None:
    body: dict[str, Any] = {"input": ["a", "some more"]}
    floats = (await ask(engine_of(), body | {"encoding_format": "float"})).json()
    packed = (await ask(engine_of(), body | {"encoding_format": "base64"})).json()
    for plain, coded in zip(floats["data"], packed["data"], strict=True):
        assert list(struct.unpack("<4f", base64.b64decode(coded["embedding"]))) == pytest.approx(plain["embedding"])


async def test_pooling_is_the_requests_or_the_servers() -> None:
    engine = engine_of()
    await ask(engine, {"input": "a", "pooling": "mean", "cache_salt": "s"})
    await ask(engine, {"input": "a", "pooling": None}, embedding_pooling="mean")
    await ask(engine, {"input": "a"})
    assert [call.params.pooling for call in engine.admitted] == ["mean", "mean", "last"]
    assert engine.admitted[0].cache_salt == "s"


async def test_dimensions_cut_and_lengthen_again_where_allowed() -> None:
    response = await ask(engine_of(), {"input": [[3, 4]], "dimensions": 2}, embedding_dimensions=True)
    assert response.json()["data"][0]["embedding"] == pytest.approx(unit([2.0, 3.0]), abs=1e-6)
    whole = await ask(engine_of(), {"input": [[3, 4]], "dimensions": 4})
    assert len(whole.json()["data"][0]["embedding"]) == 4


@pytest.mark.parametrize("dimensions", [0, -1, 5])
async def test_dimensions_outside_the_vector(dimensions: int) -> None:
    response = await ask(engine_of(), {"input": "a", "dimensions": dimensions}, embedding_dimensions=True)
    assert "between 1 and 4" in error_of(response)["message"]


async def test_dimensions_are_refused_where_the_model_does_not_bear_it() -> None:
    error = error_of(await ask(engine_of(), {"input": "a", "dimensions": 2}))
    assert error["param"] == "dimensions"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": [[1], [10**9]]}, "input[1]"),
        ({"input": "x" * 513}, "input"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
    ],
)
async def test_refused(body: dict[str, Any], param: str) -> None:
    engine = engine_of()
    error = error_of(await ask(engine, body))
    assert error["param"] == param
    assert not engine.admitted


async def test_an_input_may_fill_the_context() -> None:
    response = await ask(engine_of(), {"input": "x" * 512})
    assert response.json()["usage"]["prompt_tokens"] == 512


async def test_unknown_model() -> None:
    assert error_of(await ask(engine_of(), {"input": "a", "model": "other"}), 404)["code"] == "model_not_found"


async def test_a_long_list_goes_in_portions_and_keeps_its_order() -> None:
    engine = engine_of()
    response = await ask(engine, {"input": [[i % 200, i // 200] for i in range(MAX_INPUTS)], "normalize": False})
    data = response.json()["data"]
    assert [item["embedding"] for item in data] == [raw(i % 200, i // 200) for i in range(MAX_INPUTS)]
    assert {len(call.prompts) for call in engine.admitted} == {embeddings.INPUTS_AT_ONCE}


def test_portions_are_bounded_in_tokens_too() -> None:
    half = embeddings.TOKENS_AT_ONCE // 2
    assert embeddings._portions([half, half, 1, 2 * half + 5, 1]) == [(0, 2), (2, 3), (3, 4), (4, 5)]
    assert embeddings._portions([1]) == [(0, 1)]


async def test_a_full_queue_refuses_the_first_portion_and_delays_the_others() -> None:
    engine = engine_of()
    engine.refusal = QueueFull("full")
    assert (await ask(engine, {"input": "a"})).status_code == 429
    engine.refusal = None
    plain, calls = engine.generate, 0

    def generate(*args: Any, **options: Any) -> GenerationStream:
        nonlocal calls
        calls += 1
        if calls in (2, 3):
            raise QueueFull("full")
        return plain(*args, **options)

    engine.generate = generate  # type: ignore[method-assign]  # refuses now and then
    response = await ask(engine, {"input": [[1]] * (embeddings.INPUTS_AT_ONCE + 1)})
    assert len(response.json()["data"]) == embeddings.INPUTS_AT_ONCE + 1
    assert calls == 4


async def test_a_failure_in_the_engine_is_an_error_without_its_inside() -> None:
    engine = engine_of()
    engine.fail_after = 1
    error = error_of(await ask(engine, {"input": ["a", "b"]}), 500)
    assert "secret" not in error["message"]
    assert engine.closed == [] or engine.closed == [1]
    engine = engine_of(pause_s=0.01)
    engine.fail_after = 1
    async with client_of(engine) as client:
        job = asyncio.create_task(client.post(PATH, json={"input": ["a", "b"]}))
        await eventually(lambda: engine.admitted)
        engine.phase = Phase.DRAINING
        assert (await job).status_code == 503


async def test_every_input_ends_once_however_many_came_before_a_failure() -> None:
    engine = engine_of()
    engine.fail_after = 3
    async with client_of(engine) as client:
        error_of(await client.post(PATH, json={"input": [[1]] * 5}), 500)
        lines = (await client.get("/metrics")).text.splitlines()
    ends = [line.split() for line in lines if line.startswith("pagemill_request_success_total{")]
    assert {
        name.split('finished_reason="')[1].split('"')[0]: float(count) for name, count in ends if count != "0.0"
    } == {
        "stop": 3.0,
        "error": 2.0,
    }


async def test_a_client_that_leaves_stops_the_engine() -> None:
    engine = engine_of(pause_s=60.0)
    async with client_of(engine) as client:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.post(PATH, json={"input": "a"}), 0.3)
        await eventually(lambda: engine.closed == [1])


async def test_metrics_count_prompt_tokens() -> None:
    engine = engine_of()
    async with client_of(engine) as client:
        await client.post(PATH, json={"input": [[1, 2, 3], [4]]})
        metrics = (await client.get("/metrics")).text
    assert "pagemill_prompt_tokens_total 4.0" in metrics
    assert 'pagemill_request_success_total{finished_reason="stop"} 2.0' in metrics


@pytest.mark.parametrize("encoding", ["float", "base64", None])
async def test_openai_python(encoding: Any) -> None:
    async with client_of(engine_of()) as http:
        client = openai.AsyncOpenAI(api_key="-", base_url="http://test/v1", http_client=http)
        options = {} if encoding is None else {"encoding_format": encoding}
        answer = await client.embeddings.create(model="fake-model", input=[[5, 6]], **options)
    vector = answer.data[0].embedding
    if isinstance(vector, str):
        vector = list(struct.unpack("<4f", base64.b64decode(vector)))
    assert vector == pytest.approx(unit(raw(5, 6)), abs=1e-6)
    assert answer.usage.prompt_tokens == 2


async def test_the_salt_and_the_numbers_of_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.protocol.embeddings.MAX_NUMBERS", 11)
    engine = engine_of()
    assert error_of(await ask(engine, {"input": "a", "cache_salt": "s" * 257}))["param"] == "cache_salt"
    error = error_of(await ask(engine, {"input": ["a"] * 3}))
    assert (error["param"], "at most 2 vectors" in error["message"]) == ("input", True)
    assert engine.admitted == []
    assert (await ask(engine, {"input": ["a"] * 2, "cache_salt": "s" * 256})).status_code == 200
    assert (await ask(engine, {"input": ["a"] * 3, "dimensions": 3}, embedding_dimensions=True)).status_code == 200
