"""The sampler around the native draw: processors, raw logprobs, and one row's trouble staying that row's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import RowOutput
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
    rows = np.arange(len(params))
    ids = np.tile(np.array(tokens or [1, 2], dtype=np.int32), (len(params), 1))
    for row, each in enumerate(params):
        sampler.rows.set(row, each, row, eos)
    lengths = np.full(len(params), ids.shape[1])
    return sampler.sample(logits, rows, rows, lengths, ids, np.full(len(params), num_prompt_tokens, dtype=np.int32))


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


@pytest.mark.parametrize("logprobs", [None, 1])
def test_rows_may_share_one_logits_row_and_stand_anywhere(logprobs: int | None) -> None:
    sampler = Sampler(5, VOCAB)
    params = SamplingParams(seed=1, logprobs=logprobs)
    for row in range(5):
        sampler.rows.set(row, params, 17 + row, ())
    logits = torch.stack([torch.zeros(VOCAB), rising()[0] * 100])
    ids, ones = np.ones((5, 1), dtype=np.int32), np.ones(5, dtype=np.int32)
    outputs = sampler.sample(logits, np.array([0, 1, 0]), np.array([4, 0, 2]), np.ones(3, dtype=np.int64), ids, ones)
    assert outputs[0].token_ids != outputs[2].token_ids
    assert outputs[1].token_ids == (49,)
    if logprobs is not None:
        assert [o.top_logprobs[0].token_ids for o in outputs if o.top_logprobs] == [(0,), (49,), (0,)]


def test_logprobs_are_told_where_they_are_asked_for() -> None:
    outputs = sample(rising(3), [greedy(), greedy(logprobs=0), greedy(logit_bias=((1, 1.0),))])
    assert [len(output.logprobs) for output in outputs] == [0, 1, 0]
    assert outputs[1].top_logprobs is not None
    assert outputs[1].top_logprobs[0].token_ids == ()


def test_named_ids_follow_the_alternatives_once() -> None:
    [output] = sample(rising(), [greedy(logprobs=2, logprob_token_ids=(3, 49, 3, 7))])
    assert output.top_logprobs is not None
    assert output.top_logprobs[0].token_ids == (49, 48, 3, 7)
    wanted = torch.log_softmax(rising().double(), -1)[0][[49, 48, 3, 7]]
    assert output.top_logprobs[0].logprobs == pytest.approx(wanted.tolist(), abs=1e-6)


def test_rows_with_different_edits_keep_to_their_own() -> None:
    tokens = [5, 6, 49, 49]
    params = [
        greedy(),
        greedy(repetition_penalty=2.0),
        greedy(logit_bias=((7, 9.0), (8, 9.5))),
        greedy(frequency_penalty=2.0, logit_bias=((48, -1.0),)),
        greedy(min_tokens=3, stop_token_ids=(48,)),
        greedy(min_tokens=2),
    ]
    assert [output.token_ids for output in sample(rising(6), params, tokens, eos=(49,))] == [
        (49,), (48,), (8,), (47,), (47,), (49,),
    ]  # fmt: skip


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
