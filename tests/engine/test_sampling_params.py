"""SamplingParams: every bound, with the field's wire name in the refusal."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.sampling_params import InvalidParameter, SamplingParams


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 0), ("n", 129), ("n", True), ("n", 1.5),
        ("max_tokens", -1), ("max_tokens", 2**31),
        ("min_tokens", -1), ("min_tokens", 17),
        ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", "hot"),
        ("temperature", 10**400), ("repetition_penalty", 10**400), ("logit_bias", ((1, 10**400),)),
        ("top_p", -0.1), ("top_p", 1.5), ("top_p", math.nan),
        ("top_k", -2), ("top_k", 1.0),
        ("min_p", 1.1),
        ("seed", 2**63), ("seed", -(2**63) - 1), ("seed", 1.0),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("repetition_penalty", 0.0),
        ("logprobs", -1), ("logprobs", 1001), ("prompt_logprobs", -1), ("prompt_logprobs", 1001),
        ("logprob_token_ids", (1,) * 129), ("logprob_token_ids", (1,)), ("logprobs_mode", "cooked"),
        ("stop", ("",)), ("stop", ("x",) * 65), ("stop", ("x" * 4097,)),
        ("stop_token_ids", (1,) * 257),
        ("logit_bias", ((1, 101.0),)), ("logit_bias", ((1, math.nan),)), ("logit_bias", ((1, 1.0),) * 1025),
    ],
)  # fmt: skip
def test_out_of_bounds(param: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{param: value})
    assert caught.value.param == param
    assert len(str(caught.value)) < 200


def test_forms_that_people_bring_along() -> None:
    params: Any = SamplingParams(stop="abc", logit_bias={5: 1.0}, stop_token_ids=[7])  # type: ignore[arg-type]  # on purpose
    assert (params.stop, params.logit_bias, params.stop_token_ids) == (("abc",), ((5, 1.0),), (7,))


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 5e-324}, {"temperature": 1e308}, {"top_p": 0}, {"top_p": 1}, {"top_k": -1}, {"top_k": 2**62},
        {"seed": -(2**63)}, {"seed": 0}, {"max_tokens": None, "min_tokens": 10**6}, {"logprobs": 0},
    ],
)  # fmt: skip
def test_edges_are_allowed(fields: dict[str, Any]) -> None:
    SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "greedy"),
    [
        ({"temperature": 0}, True),
        ({"temperature": 1e-6}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0}, True),
        ({}, False),
    ],
)
def test_greedy(fields: dict[str, Any], greedy: bool) -> None:
    assert SamplingParams(**fields).greedy is greedy
