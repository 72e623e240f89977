"""Processed logprobs: of the distribution that the token was drawn from, by the rule of docs/randomness.md."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import ops
from engine.sampling import drawn
from engine.sampling.reference import Draw, candidates, exponential
from engine.sampling_params import SamplingParams
from tests.engine.test_sampler import VOCAB, greedy, rising, sample

CUTS = [
    {},
    {"top_k": 1_000},
    {"top_k": 7},
    {"top_p": 0.9},
    {"top_p": 0.01},
    {"top_p": 0.999999},
    {"min_p": 0.02},
    {"min_p": 1e-14},
    {"min_p": 1.0},
    {"top_k": 300, "top_p": 0.7, "min_p": 0.01},
]


def drawn_from(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What the compiled sampler says it drew the one row [vocab] from, on every level."""
    told = []
    for level in ops.isa_levels():
        ops.set_isa(level)
        drawn = ops.Drawn(torch.full((1, len(logits)), torch.nan), torch.zeros(1, dtype=torch.int64))
        ids = ops.sample(
            logits[None],
            torch.tensor([params.temperature], dtype=torch.float32),
            torch.tensor([params.top_k], dtype=torch.int32),
            torch.tensor([params.top_p], dtype=torch.float32),
            torch.tensor([params.min_p], dtype=torch.float32),
            torch.tensor([params.greedy]),
            torch.zeros(1, dtype=torch.int64),
            torch.zeros(1, dtype=torch.int64),
            drawn=drawn,
        )
        assert drawn.logits[0, int(ids)] > -torch.inf
        told.append(drawn.logits[0])
    ops.set_isa("auto")
    assert all(torch.equal(each, told[0]) for each in told)
    return told[0]


def expected(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    draw = Draw(params.temperature, params.top_k, params.top_p, params.min_p)
    kept = torch.tensor(candidates(logits.numpy(), draw))
    told = torch.full_like(logits, -torch.inf)
    told[kept] = (logits[kept] - logits.max()) / params.temperature
    return told


def rows(kind: str) -> torch.Tensor:
    logits = torch.randn(3_000, generator=torch.Generator().manual_seed(5)) * 3
    if kind == "ties":  # as bfloat16 heads make them, with both zeros
        logits = logits.round()
        logits[::7] = -0.0
    elif kind == "equal":
        logits = torch.full_like(logits, 2.5)
    elif kind == "banned":
        logits[torch.rand(3_000, generator=torch.Generator().manual_seed(6)) < 0.9] = -torch.inf
    elif kind == "one":
        logits[:] = -torch.inf
        logits[17] = -3.0
    return logits


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "banned", "one"])
def test_what_is_kept_is_what_the_rule_keeps(kind: str, cut: dict[str, Any]) -> None:
    logits = rows(kind)
    for temperature in (0.05, 0.8, 50.0):
        params = SamplingParams(temperature=temperature, **cut)
        before = logits.clone()
        assert torch.equal(drawn_from(logits, params), expected(logits, params))
        assert torch.equal(logits, before)


@given(
    st.lists(st.sampled_from([-30.0, -1.5, -0.0, 0.0, 1e-30, 0.5, 0.50000006, 7.0, -np.inf]), min_size=2, max_size=40),
    st.integers(2, 30),
    st.floats(2**-10, 1.0, width=32),
)
def test_neighbouring_values_are_told_apart_and_equal_ones_by_their_ids(
    values: list[float], top_k: int, top_p: float
) -> None:
    logits = torch.tensor([*values, 0.25])
    params = SamplingParams(temperature=1.0, top_k=top_k, top_p=top_p)
    assert torch.equal(drawn_from(logits, params), expected(logits, params))


def test_a_large_vocabulary_sums_exactly() -> None:
    logits = torch.zeros(200_000)  # weights of 2^40 each: their sum is far past what a float64 counts one by one
    for top_p, count in ((0.5, 100_000), (1 / 3, None)):
        told = drawn_from(logits, SamplingParams(temperature=1.0, top_p=top_p))
        wanted = count or int(np.ceil(float(np.float32(top_p)) * 200_000))
        assert int((told > -torch.inf).sum()) == wanted
        assert bool((told[:wanted] == 0).all())


@pytest.mark.parametrize(
    ("fields", "tokens", "processed"),
    [
        ({"logit_bias": ((5, 50.0),)}, [1, 2], {5: 0.5 + 50.0}),
        ({"presence_penalty": 2.0}, [1, 2, 49], {49: 4.9 - 2.0}),
        ({"frequency_penalty": 1.0}, [1, 2, 49, 49], {49: 4.9 - 2.0}),
        ({"repetition_penalty": 1.5}, [49, 48], {49: 4.9 / 1.5, 48: 4.8 / 1.5}),
        ({"min_tokens": 3, "stop_token_ids": (49,)}, [1, 2], {49: -torch.inf}),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_processors_show_in_processed_logprobs(
    temperature: float, fields: dict[str, Any], tokens: list[int], processed: dict[int, float]
) -> None:
    logits = rising()[0].double()
    for token_id, logit in processed.items():
        logits[token_id] = logit
    wanted = torch.log_softmax(logits / (temperature or 1.0), -1)
    params = SamplingParams(temperature=temperature, logprobs=20, logprobs_mode="processed", **fields)
    neighbour = greedy(logit_bias=((3, 9.0),), logprobs=20)
    output, other = sample(rising(2), [params, neighbour], tokens)
    assert output.error is None
    assert output.logprobs[0] == pytest.approx(float(wanted[output.token_ids[0]]), abs=1e-5)
    assert output.top_logprobs is not None
    told = output.top_logprobs[0]
    assert set(told.token_ids) == set(torch.topk(wanted, 20).indices.tolist())
    assert told.logprobs == pytest.approx([float(wanted[i]) for i in told.token_ids], abs=1e-5)
    if temperature == 0:
        assert output.token_ids[0] == told.token_ids[0] == int(wanted.argmax())
    raw = torch.log_softmax(rising()[0].double(), -1)
    assert other.top_logprobs is not None
    assert other.top_logprobs[0].token_ids[0] == VOCAB - 1, "a raw row beside it is told raw"
    assert other.top_logprobs[0].logprobs[0] == pytest.approx(float(raw[VOCAB - 1]), abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processed_row_that_is_not_finite_fails_alone(temperature: float) -> None:
    logits = rising(2)
    logits[0, 3] = torch.nan
    params = SamplingParams(temperature=temperature, top_p=0.5, logprobs=2, logprobs_mode="processed")
    bad, good = sample(logits, [params, params])
    assert bad.error is not None
    assert good.error is None


@pytest.mark.parametrize("kind", ["plain", "ties", "equal", "banned", "one"])
def test_in_torch_it_is_the_same_to_the_bit(kind: str) -> None:
    """As devices tell it: sampling/drawn.py, all cuts in one batch."""
    params = [SamplingParams(temperature=t, **cut) for t in (0.05, 0.8, 50.0, 0.0) for cut in CUTS]
    logits = rows(kind)
    told = drawn.drawn_from(
        logits.repeat(len(params), 1),
        torch.tensor([each.temperature for each in params], dtype=torch.float32),
        torch.tensor([each.top_k for each in params], dtype=torch.int32),
        torch.tensor([each.top_p for each in params], dtype=torch.float32),
        torch.tensor([each.min_p for each in params], dtype=torch.float32),
        torch.tensor([each.greedy for each in params], dtype=torch.uint8),
    )
    for row, each in zip(told, params, strict=True):
        assert torch.equal(row, logits if each.greedy else expected(logits, each))


def test_the_exponential_is_that_of_the_rule() -> None:
    exponents = -torch.rand(10_000, generator=torch.Generator().manual_seed(1)) * 40
    exponents[:3] = torch.tensor([0.0, -30.0, -torch.inf])
    assert np.array_equal(drawn.exponential(exponents).numpy(), exponential(exponents.numpy()))
