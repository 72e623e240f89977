"""Beam search on the wire: what reaches the engine, what is refused, and what is told."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from engine.outputs import SamplingDefaults
from engine.sampling_params import BeamSearch
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of, error_of

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
DEFAULTS = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.1)


def engine_of() -> FakeEngine:
    tokenizer = small_tokenizer()
    return FakeEngine(says("found", tokenizer), tokenizer=tokenizer, defaults=DEFAULTS)


async def ask(engine: FakeEngine, path: str, body: dict[str, Any]) -> httpx.Response:
    given = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    async with client_of(engine) as client:
        return await client.post(path, json=given | {"use_beam_search": True} | body)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_best_of_is_the_width_and_n_the_number_told(path: str) -> None:
    engine = engine_of()
    body = {"n": 2, "best_of": 5, "length_penalty": 0.5, "early_stopping": "never", "temperature": 0, "seed": 7}
    answer = (await ask(engine, path, body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 2 * 6
    params = engine.admitted[0].params
    assert params.n == 2
    assert params.beam == BeamSearch(5, length_penalty=0.5, early_stopping="never")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_n_alone_is_the_width_and_the_models_defaults_do_not_count(path: str) -> None:
    engine = engine_of()
    assert (await ask(engine, path, {"n": 3})).status_code == 200
    params = engine.admitted[0].params
    assert params.beam == BeamSearch(3)
    assert (params.n, params.repetition_penalty, params.top_p, params.top_k, params.min_p) == (3, 1.0, 1.0, 0, 0.0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stream": True}, "stream"),
        ({"temperature": 0.7}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 5}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"stop": "x"}, "stop"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"repetition_penalty": 1.5}, "repetition_penalty"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 3, "best_of": 2}, None),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"best_of": 129}, "best_of"),
        ({"length_penalty": 1e9}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": None, "length_penalty": 2.0}, "length_penalty"),
        ({"use_beam_search": False, "early_stopping": True}, "early_stopping"),
    ],
)
async def test_refused(path: str, body: dict[str, Any], param: str | None) -> None:
    engine = engine_of()
    error = error_of(await ask(engine, path, body))
    assert error["param"] == (param or ("best_of" if path == COMPLETIONS else "n"))
    assert not engine.admitted


async def test_neutral_values_are_accepted() -> None:
    neutral = {"temperature": 1, "top_p": 1.0, "top_k": -1, "min_p": 0, "presence_penalty": 0, "stream": False}
    assert (await ask(engine_of(), COMPLETIONS, neutral)).status_code == 200
    unused = {"use_beam_search": False, "length_penalty": 1.0, "early_stopping": False}
    assert (await ask(engine_of(), CHAT, unused)).status_code == 200


async def test_echo_goes_before_each_result_but_not_with_logprobs() -> None:
    answer = (await ask(engine_of(), COMPLETIONS, {"echo": True, "n": 2})).json()
    assert [choice["text"] for choice in answer["choices"]] == ["hifound"] * 2
    assert error_of(await ask(engine_of(), COMPLETIONS, {"echo": True, "logprobs": 1}))["param"] == "echo"


async def test_chat_has_best_of_for_searches_only() -> None:
    assert error_of(await ask(engine_of(), CHAT, {"use_beam_search": None, "best_of": 2}))["param"] == "best_of"
