"""Beam search finds what transformers.generate(num_beams=...) finds, in float32 on small models made on the spot."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.sampling_params import BeamSearch, InvalidParameter, SamplingParams
from tests.engine.harness import Harness
from tests.engine.preempting import load_preempting
from tests.tiny import tiny_folder

EOS = 2
STOPS = tuple(range(100, 112))  # so that many hypotheses end on the way
Found = list[tuple[list[int], str]]


def config_of(model: Path, *, caching: bool = True, budget: int = 2048, max_num_seqs: int = 16) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", max_model_len=200),
        cache=CacheConfig(memory_bytes=32 << 20, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=32),
    )


def params_of(
    width: int, n: int, penalty: float, early: Any, *, max_tokens: int = 24, **options: Any
) -> SamplingParams:
    beam = BeamSearch(width, length_penalty=penalty, early_stopping=early)
    return SamplingParams(n=n, max_tokens=max_tokens, stop_token_ids=STOPS, beam=beam, **options)


def theirs(model: Any, prompt: list[int], params: SamplingParams) -> Found:
    """What transformers makes of it: output tokens, and how they end."""
    assert params.beam is not None
    stops = [*STOPS] if params.ignore_eos else [EOS, *STOPS]
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=params.beam.width,
            num_return_sequences=params.n,
            max_new_tokens=params.max_tokens,
            min_new_tokens=params.min_tokens or None,
            length_penalty=params.beam.length_penalty,
            early_stopping=params.beam.early_stopping,
            eos_token_id=stops,
            pad_token_id=0,
            do_sample=False,
        )
    results: Found = []
    for tokens in found[:, len(prompt) :].tolist():
        end = next((index for index, token in enumerate(tokens) if token in stops), None)
        results.append((tokens, "length") if end is None else (tokens[: end + 1], "stop"))
    return results


def ours(harness: Harness, prompts: list[list[int]], params: list[SamplingParams]) -> list[Found]:
    results = []
    for result in harness.run_each(prompts, params):
        assert all(generated.error is None for generated in result.values())
        results.append([(each.token_ids, str(each.finish_reason)) for _, each in sorted(result.items())])
    return results


def cases() -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(4)
    prompts, params = [], []
    for penalty, early in itertools.product((1.0, 0.0, -1.0, 2.0), (False, True, "never")):
        width = rng.choice((2, 3, 5))
        prompts.append([rng.randrange(3, 100) for _ in range(rng.choice((1, 15, 16, 17, 40)))])
        params.append(params_of(width, rng.randint(1, width), penalty, early))
    prompts += [prompts[3], prompts[4], prompts[5]]
    params += [
        params_of(4, 4, 1.0, False, min_tokens=9),
        params_of(4, 2, 1.0, True, ignore_eos=True, max_tokens=1),
        params_of(1, 1, 1.0, False),
    ]
    return prompts, params


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_equals_transformers(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompts, params = cases()
    expected = [theirs(model, prompt, each) for prompt, each in zip(prompts, params, strict=True)]
    reasons = [reason for found in expected for _, reason in found]
    assert min(reasons.count("stop"), reasons.count("length")) > 3, "both ends are tried"
    with Harness(config_of(folder)) as harness:
        alone = [ours(harness, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]
        assert alone == expected
        assert ours(harness, prompts, params) == expected, "together, warm"
    with Harness(config_of(folder, caching=False, budget=24)) as harness:
        assert ours(harness, prompts, params) == expected, "in small chunks, without prefix cache"
    for caching in (True, False):
        with Harness(config_of(folder, caching=caching), load_preempting) as harness:
            assert ours(harness, prompts, params) == expected, "under preemption"
            harness.settle()
            assert max(stats.num_preemptions for stats in harness.finished) >= 1


def test_logprobs_belong_to_the_tokens(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    prompt = list(range(10, 30))
    with Harness(config_of(folder)) as harness:
        found = harness.run([prompt], params_of(3, 2, 1.0, False, max_tokens=6, logprobs=2))
        for result in found.values():
            ids = prompt + result.token_ids
            again = harness.run([ids], SamplingParams(max_tokens=0, prompt_logprobs=2))[0, 0]
            start = len(prompt) - 1
            assert result.logprobs == pytest.approx(again.prompt_logprobs[start:], abs=1e-5)
            assert [top.token_ids for top in result.top_logprobs] == [t.token_ids for t in again.prompt_top[start:]]
        totals = [sum(result.logprobs) / len(result.token_ids) for _, result in sorted(found.items())]
        assert totals == sorted(totals, reverse=True)


@pytest.mark.parametrize(
    ("prompt_len", "params", "param"),
    [
        (5, params_of(17, 1, 1.0, False), "best_of"),
        (190, params_of(2, 1, 1.0, False), "prompt"),
    ],
)
def test_what_cannot_be_held_is_refused_at_the_door(
    prompt_len: int, params: SamplingParams, param: str, tmp_path: Path
) -> None:
    with Harness(config_of(tiny_folder(tmp_path, "llama"))) as harness:
        with pytest.raises(InvalidParameter) as caught:
            harness.run([[5] * prompt_len], params)
        assert caught.value.param == param


def test_more_memory_than_the_pool_has_is_refused_at_the_door(tmp_path: Path) -> None:
    config = config_of(tiny_folder(tmp_path, "qwen3"))
    small = CacheConfig(memory_bytes=16 * 16 * 2 * 2 * 16 * 2 * 4)  # sixteen blocks of two layers
    with Harness(EngineConfig(model=config.model, cache=small, scheduler=config.scheduler)) as harness:
        assert harness.engine.model_info.num_blocks == 16
        with pytest.raises(InvalidParameter, match="KV memory") as caught:
            harness.run([[5] * 40], params_of(8, 1, 1.0, False, max_tokens=60))
        assert caught.value.param == "max_tokens"
        assert len(harness.run([[5] * 40], params_of(3, 3, 1.0, False, max_tokens=30))) == 3


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 3}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ("x",)}, "stop"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"logit_bias": ((5, 1.0),)}, "logit_bias"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": 1, "logprobs_mode": "processed"}, "logprobs_mode"),
        ({"logprobs": 1, "logprob_token_ids": (5,)}, "logprob_token_ids"),
    ],
)
def test_what_a_search_does_not_look_at_is_refused(options: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        SamplingParams(**{"beam": BeamSearch(2), **options})
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"width": 0}, "best_of"),
        ({"width": 129}, "best_of"),
        ({"width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"width": 2, "length_penalty": 21.0}, "length_penalty"),
        ({"width": 2, "early_stopping": "soon"}, "early_stopping"),
    ],
)
def test_bounds_of_a_search(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        BeamSearch(**values)
    assert caught.value.param == param
