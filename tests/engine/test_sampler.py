"""The sampler around the native draw: processors, raw logprobs, and one row's trouble staying that row's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import RowOutput
from engine.sampling.logits import RowContext
from engine.sampling.sampler import Sampler
from engine.sampling_params import SamplingParams

VOCAB = 50


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    tokens: list[int] | None = None,
    *,
    num_prompt_tokens: int = 2,
    eos: tuple[int, ...] = (),
    vocab_size: int = VOCAB,
) -> list[RowOutput]:
    sampler = Sampler(len(params), vocab_size)
    ids = np.array(tokens or [1, 2], dtype=np.int32)
    contexts = []
    for row, each in enumerate(params):
        sampler.rows.set(row, each, row, eos)
        contexts.append(RowContext(each, ids, num_prompt_tokens, eos))
    return sampler.sample(logits, np.arange(len(params)), list(range(len(params))), contexts)


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


def rising(rows: int = 1) -> torch.Tensor:
    return (torch.arange(VOCAB, dtype=torch.float32) / 10).repeat(rows, 1)


def test_logprobs_are_of_the_raw_distribution_whatever_the_processors_did() -> None:
    [output] = sample(rising(), [greedy(logit_bias=((49, -100.0),), logprobs=2)])
    expected = torch.log_softmax(rising().double(), -1)[0]
    assert output.token_ids == (48,)
    assert output.logprobs[0] == pytest.approx(float(expected[48]), abs=1e-6)
    assert output.top_logprobs is not None
    assert output.top_logprobs[0].token_ids == (49, 48)
    assert output.top_logprobs[0].logprobs == pytest.approx([float(expected[49]), float(expected[48])], abs=1e-6)


def test_ties_among_the_alternatives_go_to_the_lower_id() -> None:
    [output] = sample(torch.zeros(1, VOCAB), [greedy(logprobs=3)])
    assert output.token_ids == (0,)
    assert output.top_logprobs is not None
    assert output.top_logprobs[0].token_ids == (0, 1, 2)


def test_penalties_count_what_they_should() -> None:
    tokens = [49, 3, 48, 48]  # prompt 49, 3; output 48, 48
    for fields, expected in (
        ({"presence_penalty": 0.05}, 49),
        ({"frequency_penalty": 0.2}, 49),
        ({"repetition_penalty": 1.5}, 47),
        ({"presence_penalty": -0.2}, 48),
        ({"frequency_penalty": -0.06}, 48),
    ):
        [output] = sample(rising(), [greedy(**fields)], tokens)
        assert output.token_ids == (expected,), fields


def test_repetition_penalty_pushes_negative_logits_down_too() -> None:
    logits = torch.full((1, VOCAB), -2.0)
    logits[0, 5] = -1.0
    [output] = sample(logits, [greedy(repetition_penalty=3.0)], [5, 6])
    assert output.token_ids == (0,)


def test_stops_wait_for_min_tokens() -> None:
    params = greedy(min_tokens=2, stop_token_ids=(48,))
    assert sample(rising(), [params], [1, 2, 7], eos=(49,))[0].token_ids == (47,)
    assert sample(rising(), [params], [1, 2, 7, 7], eos=(49,))[0].token_ids == (49,)


def test_ids_past_the_tokenizers_vocabulary_are_never_sampled() -> None:
    assert sample(rising(), [greedy()], vocab_size=40)[0].token_ids == (39,)


def test_two_rows_may_share_one_logits_row() -> None:
    sampler = Sampler(2, VOCAB)
    params = SamplingParams(seed=1)
    context = RowContext(params, np.array([1], dtype=np.int32), 1, ())
    for row in (0, 1):
        sampler.rows.set(row, params, 17 + row, ())
    outputs = sampler.sample(torch.zeros(1, VOCAB), np.array([0, 0]), [0, 1], [context, context])
    assert outputs[0].token_ids != outputs[1].token_ids


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float) -> None:
    logits = rising(3)
    logits[1, 7] = bad
    outputs = sample(logits, [greedy(), greedy(), greedy()])
    assert [o.error is not None for o in outputs] == [False, True, False]
    assert outputs[0].token_ids == outputs[2].token_ids == (49,)


def test_parameters_that_cannot_be_applied_fail_alone() -> None:
    outputs = sample(rising(2), [greedy(min_tokens=5), greedy()], eos=(VOCAB + 3,))
    assert outputs[0].error is not None
    assert outputs[1].token_ids == (49,)
