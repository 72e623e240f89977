"""Every failure has OpenAI's shape; bodies that would break a parser are a 400."""

from __future__ import annotations

import json
import random

import pytest

from engine.outputs import NotServing, QueueFull
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of

PATHS = ["/v1/completions", "/v1/chat/completions", "/tokenize"]
TOKENIZER = small_tokenizer()


def engine_saying(text: str = "hello") -> FakeEngine:
    return FakeEngine(says(text, TOKENIZER), tokenizer=TOKENIZER)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"{:",
        b"",
        b"[]",
        b'"x"',
        b"null",
        b"5",
        b"{}",
        b'{"model": }',
        b"[" * 100_000,
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
        b'{"prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"prompt": "x \\ud83d y"}',
        b'{"prompt": "\xff\xfe\x80"}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": Infinity}',
        b'{"prompt": "a", "temperature": -Infinity}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "logit_bias": {"5": NaN}}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    ],
    ids=range(19),
)
async def test_malformed_bodies(path: str, body: bytes) -> None:
    async with client_of(engine_saying()) as client:
        error = error_of(await client.post(path, content=body))
        alive = await client.post("/v1/completions", json={"prompt": "a"})
    assert error["type"] == "invalid_request_error"
    assert ".py" not in error["message"]
    assert len(error["message"]) < 300
    assert alive.status_code == 200


async def test_unknown_routes_and_methods() -> None:
    async with client_of(engine_saying()) as client:
        assert error_of(await client.post("/v1/no-such-path", json={}), 404)["code"] == "not_found"
        wrong_method = await client.get("/v1/completions")
        shared_path = await client.post("/v1/responses/resp_0")
        within = await client.put("/v1/responses/input_tokens")
        assert error_of(wrong_method, 405)["code"] == "method_not_allowed"
        allowed = [each.headers["allow"] for each in (wrong_method, shared_path, within)]
        assert allowed == ["POST", "DELETE, GET", "POST"]


@pytest.mark.parametrize("path", PATHS)
async def test_unknown_model(path: str) -> None:
    body = {"model": "no/such-model" * 10, "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    async with client_of(engine_saying()) as client:
        error = error_of(await client.post(path, json=body), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


async def test_body_above_the_limit() -> None:
    async with client_of(engine_saying(), max_body_size=1000) as client:
        error_of(await client.post("/v1/completions", json={"prompt": "x" * 2000}), 413)


async def test_a_large_body_is_served() -> None:
    engine = engine_saying()
    async with client_of(engine) as client:
        body = {"prompt": "a", "metadata": {"fill": "x" * 1_000_000}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        error_of(await client.post("/v1/completions", json=body | {"n": "two"}))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_queue(stream: bool) -> None:
    engine = engine_saying()
    engine.refusal = QueueFull("The queue is full.", retry_after_s=7)
    async with client_of(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert error_of(response, 429)["code"] == "rate_limit_exceeded"
    assert response.headers["retry-after"] == "7"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_does_not_serve(stream: bool) -> None:
    engine = engine_saying()
    engine.refusal = NotServing("The engine is draining.")
    async with client_of(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert error_of(response, 503)["type"] == "server_error"
    assert "retry-after" in response.headers


async def test_an_unexpected_exception_tells_nothing() -> None:
    engine = engine_saying()
    engine.refusal = RuntimeError("secret detail")
    async with client_of(engine) as client:
        response = await client.post("/v1/completions", json={"prompt": "a"})
    assert error_of(response, 500)["type"] == "server_error"
    assert "secret" not in response.text


@pytest.mark.parametrize("path", PATHS[:2])
async def test_a_failure_inside_the_engine(path: str) -> None:
    engine = engine_saying()
    engine.splits = random.Random(3)
    engine.fail_after = 2
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    async with client_of(engine) as client:
        plain = await client.post(path, json=body)
        streamed = await client.post(path, json=body | {"stream": True})
        metrics = (await client.get("/metrics")).text
    assert error_of(plain, 500)["code"] == "server_error"
    assert "secret" not in plain.text + streamed.text
    assert streamed.status_code == 200
    *_, last, done = [block for block in streamed.text.split("\n\n") if block]
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "server_error"
    assert '"finish_reason":"' not in streamed.text
    assert 'errors_total{code="500"} 2.0' in metrics
