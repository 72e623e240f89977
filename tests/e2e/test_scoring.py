"""Scoring over HTTP, as evaluation harnesses ask for it: token ids, echo, logprobs, one token or none."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.model

CONTEXT = "The capital of France is"


def ids_of(http: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def choices(http: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/completions", json={"seed": 1234, "echo": True, "logprobs": 1, **body})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return found


def test_the_likelier_continuation_and_greedy_ones(http: httpx.Client) -> None:
    """What lm-evaluation-harness sends and how it reads the answer (its `local-completions`, loglikelihood)."""
    context = ids_of(http, CONTEXT)
    prompts = [context + ids_of(http, text) for text in (" Paris", " a spoon", " Berlin")]
    sums, greedy = [], []
    for choice in choices(http, prompt=prompts, max_tokens=1):
        told = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        sums.append(sum(told))
        greedy.append(all(value == max(top.values()) for value, top in zip(told, tops, strict=True)))
    assert max(sums) == sums[0]
    assert not any(greedy[1:])
    scored = choices(http, prompt=prompts, max_tokens=0)
    assert [sum(c["logprobs"]["token_logprobs"][len(context) :]) for c in scored] == sums
    assert [choice["finish_reason"] for choice in scored] == ["length"] * 3


def test_cold_and_warm_tell_the_same(http: httpx.Client) -> None:
    prompt = ids_of(http, "Scoring is the same whatever the cache holds. " * 30)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "cache_salt": "cold", "logprobs": 5}
    [cold] = choices(http, **body)
    [plain] = choices(http, **body, echo=False)
    [warm] = choices(http, **body)
    assert warm == cold
    assert warm["logprobs"]["token_logprobs"][len(prompt) :] == plain["logprobs"]["token_logprobs"]
    assert all(math.isfinite(value) for value in cold["logprobs"]["token_logprobs"][1:])
    with http.stream("POST", "/v1/completions", json=body | {"echo": True, "stream": True}) as response:
        text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n")


def test_a_thousand_prompts(http: httpx.Client) -> None:
    context = ids_of(http, CONTEXT)
    found = choices(http, prompt=[[*context[: 1 + i % 5], 100 + i % 7] for i in range(1024)], max_tokens=0)
    assert [choice["index"] for choice in found] == list(range(1024))
    assert [len(choice["logprobs"]["tokens"]) for choice in found] == [2 + i % 5 for i in range(1024)]
    for choice in found:
        assert choice["logprobs"] == found[choice["index"] % 35]["logprobs"]
