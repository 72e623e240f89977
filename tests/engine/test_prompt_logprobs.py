"""Logprobs of the prompt: equal to transformers' in float32, bit for bit the same however the prompt was computed."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.sampling_params import SamplingParams
from tests.engine.harness import Generated, Harness
from tests.engine.preempting import load_preempting
from tests.tiny import VOCAB_SIZE, tiny_folder

SCORE = SamplingParams(max_tokens=0, prompt_logprobs=3)
BOTH = SamplingParams(max_tokens=6, temperature=0.0, prompt_logprobs=3, logprobs=3, ignore_eos=True)
PLAIN = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3, ignore_eos=True)


def config_of(
    model: Path, *, budget: int = 2048, chunk: int = 512, depth: int = 1, dtype: str = "float32"
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype=dtype, max_model_len=400),  # type: ignore[arg-type]  # parametrised
        cache=CacheConfig(memory_bytes=200 << 20),
        scheduler=SchedulerConfig(
            max_num_seqs=16, max_num_batched_tokens=budget, max_chunk_tokens=chunk, pipeline_depth=depth
        ),
        device=DeviceConfig(num_threads=2),
    )


def prompts() -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 16, 17, 64, 65, 130, 300)]


def scores(got: Generated) -> tuple[object, ...]:
    assert got.error is None
    return got.prompt_logprobs, got.prompt_ranks, got.prompt_top


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3"])
def test_equal_to_transformers(tmp_path: Path, kind: str) -> None:
    folder = tiny_folder(tmp_path, kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with Harness(config_of(folder)) as harness:
        result = harness.run(prompts(), BOTH)
    for index, prompt in enumerate(prompts()):
        got = result[index, 0]
        whole = prompt + got.token_ids
        with torch.inference_mode():
            expected = torch.log_softmax(model(torch.tensor([whole])).logits[0].double(), -1)
        told = got.prompt_logprobs + got.logprobs
        tops = got.prompt_top + got.top_logprobs
        assert len(told) == len(tops) == len(whole) - 1
        assert got.finish_reason == "length"
        for position, (token_id, logprob, top) in enumerate(zip(whole[1:], told, tops, strict=True)):
            row = expected[position]
            assert math.isfinite(logprob)
            assert logprob == pytest.approx(float(row[token_id]), abs=1e-4)
            assert top.logprobs == pytest.approx(torch.topk(row, 3).values.tolist(), abs=1e-4)
            assert top.logprobs == pytest.approx(row[list(top.token_ids)].tolist(), abs=1e-4)
        for rank, logprob, top in zip(got.prompt_ranks, got.prompt_logprobs, got.prompt_top, strict=True):
            assert (rank <= 3) == (logprob in top.logprobs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bits_cold_warm_chunked_preempted_and_beside_others(tmp_path: Path, dtype: str) -> None:
    folder = tiny_folder(tmp_path, "llama")
    with Harness(config_of(folder, dtype=dtype)) as harness:
        alone = [harness.run([p], SCORE)[0, 0] for p in prompts()]
        assert [got.finish_reason for got in alone] == ["length"] * len(alone)
        assert not any(got.token_ids for got in alone)
        truth = [scores(got) for got in alone]
        harness.run(prompts(), PLAIN)
        warm = harness.run(prompts(), BOTH)
        assert [scores(warm[i, 0]) for i in range(len(truth))] == truth
        assert all(got.num_cached_tokens == 0 for got in warm.values())
        plain = harness.run(prompts(), PLAIN)
        assert [got.token_ids for got in plain.values()] == [got.token_ids for got in warm.values()]
        assert [got.logprobs for got in plain.values()] == [got.logprobs for got in warm.values()]
    for config in (
        config_of(folder, dtype=dtype, budget=64, chunk=16),
        config_of(folder, dtype=dtype, budget=64, depth=2),
    ):
        for params in (SCORE, BOTH):
            with Harness(config, load_preempting) as harness:
                mixed = harness.run_each([*prompts(), *prompts()], [params] * len(truth) + [PLAIN] * len(truth))
            assert [scores(result[0, 0]) for result in mixed[: len(truth)]] == truth
            if params is BOTH:
                assert [r[0, 0].token_ids for r in mixed[: len(truth)]] == [
                    warm[i, 0].token_ids for i in range(len(truth))
                ]


def test_one_choice_brings_them_for_all(tmp_path: Path) -> None:
    with Harness(config_of(tiny_folder(tmp_path, "llama"))) as harness:
        params = SamplingParams(max_tokens=3, n=3, seed=1, prompt_logprobs=0, ignore_eos=True)
        result = harness.run([prompts()[4]], params)
        none = harness.run([prompts()[4]], SamplingParams(max_tokens=0, n=3))
    assert [len(result[0, choice].prompt_logprobs) for choice in range(3)] == [63, 0, 0]
    assert [len(result[0, choice].token_ids) for choice in range(3)] == [3, 3, 3]
    assert [(none[0, c].token_ids, none[0, c].finish_reason) for c in range(3)] == [([], "length")] * 3


def test_never_more_than_a_slice_of_logits_at_once(tmp_path: Path) -> None:
    with Harness(config_of(tiny_folder(tmp_path, "llama"))) as harness:
        backbone = harness.engine._loop._runner.backbone
        rows: list[int] = []
        logits = backbone.model.logits

        class Watched:
            def __getattr__(self, name: str) -> object:
                return getattr(model, name)

            def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
                rows.append(len(hidden_states))
                return logits(hidden_states)

        model, backbone.model = backbone.model, Watched()  # type: ignore[assignment]
        harness.run(prompts(), SCORE)
    assert max(rows) == 64
    assert sum(rows) == sum(len(p) - 1 for p in prompts())


def test_named_ids_and_the_distribution_that_was_drawn_from(tmp_path: Path) -> None:
    with Harness(config_of(tiny_folder(tmp_path, "llama"))) as harness:
        shared = dict(max_tokens=4, temperature=0.7, top_k=5, seed=3, ignore_eos=True, logit_bias={9: 2.0})
        raw = harness.run([prompts()[3]], SamplingParams(**shared, logprobs=8, logprob_token_ids=(7, 9)))[0, 0]
        processed = harness.run([prompts()[3]], SamplingParams(**shared, logprobs=8, logprobs_mode="processed"))[0, 0]
    assert processed.token_ids == raw.token_ids
    assert processed.logprobs != raw.logprobs
    for top, drawn, logprob in zip(raw.top_logprobs, processed.top_logprobs, processed.logprobs, strict=True):
        assert {7, 9} <= set(top.token_ids)
        assert len(set(top.token_ids)) == len(top.token_ids) <= 10
        assert len(drawn.token_ids) == 5
        assert sum(map(math.exp, drawn.logprobs)) == pytest.approx(1.0, abs=1e-5)
        assert logprob in drawn.logprobs
