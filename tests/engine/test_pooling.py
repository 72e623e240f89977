"""Vectors instead of tokens: equal to transformers' hidden states, and the same whatever happens around a prompt."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.assembly import EngineParts, load_engine
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.sampling_params import Pooling, SamplingParams
from tests.engine.harness import Harness
from tests.engine.preempting import load_preempting
from tests.tiny import VOCAB_SIZE, tiny_folder

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)


def config_of(model: Path, *, budget: int = 2048, chunk: int = 512, max_num_seqs: int = 16) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype="float32", max_model_len=600),
        cache=CacheConfig(memory_bytes=64 << 20),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=chunk),
    )


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(100)]
    tails = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 15, 16, 17, 90)))] for _ in range(count)]
    return [shared + tail if i % 2 else tail for i, tail in enumerate(tails)]


async def _embed(harness: Harness, prompts: list[list[int]], pooling: Pooling) -> list[tuple[bytes, int]]:
    vectors: dict[int, tuple[bytes, int]] = {}
    stream = harness.engine.generate(prompts, SamplingParams(max_tokens=0, pooling=pooling))
    async for outputs in stream:
        for output in outputs:
            assert output.error is None
            assert output.token_ids == ()
            assert output.embedding is not None
            vectors[output.prompt_index] = output.embedding, output.num_cached_tokens
    return [vectors[index] for index in range(len(prompts))]


def embed(harness: Harness, prompts: list[list[int]], pooling: Pooling) -> list[bytes]:
    """All at once."""
    return [vector for vector, _ in harness.loop.run_until_complete(_embed(harness, prompts, pooling))]


def preempting_often(config: EngineConfig) -> EngineParts:
    """Every fourth step: three of 64 tokens are enough for the longest prompt."""
    parts = load_preempting(config)
    parts.scheduler.period = 4  # type: ignore[attr-defined]  # of PreemptingScheduler
    return parts


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_equals_transformers(kind: str, pooling: Pooling, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    body = AutoModelForCausalLM.from_pretrained(folder).model
    prompts = prompts_of(5)
    with Harness(config_of(folder, budget=64, chunk=32)) as harness:
        vectors = embed(harness, prompts, pooling)
    for prompt, vector in zip(prompts, vectors, strict=True):
        with torch.inference_mode():
            hidden = body(input_ids=torch.tensor([prompt]), use_cache=False).last_hidden_state[0].double()
        expected = (hidden[-1] if pooling == "last" else hidden.mean(0)).numpy()
        assert np.abs(np.frombuffer(vector, "<f4") - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_nothing_around_a_prompt_changes_its_vector(pooling: Pooling, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    prompts = prompts_of(20)
    with Harness(config_of(folder)) as harness:
        cold = [embed(harness, [prompt], pooling)[0] for prompt in prompts]
        assert [embed(harness, [prompt], pooling)[0] for prompt in prompts] == cold, "warm"
        assert embed(harness, prompts, pooling) == cold, "together"

        async def beside_generation() -> list[tuple[bytes, int]]:
            other = harness.collect([prompts[3]], SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True))
            vectors, _ = await asyncio.gather(_embed(harness, prompts, pooling), other)
            return vectors

        assert [v for v, _ in harness.loop.run_until_complete(beside_generation())] == cold, "beside a generation"
    for budget, chunk in ((32, 7), (16, 16)):
        with Harness(config_of(folder, budget=budget, chunk=chunk)) as harness:
            assert embed(harness, prompts, pooling) == cold, f"chunks of {chunk}"

    with Harness(config_of(folder, budget=64, chunk=64, max_num_seqs=4), preempting_often) as harness:
        assert embed(harness, prompts, pooling) == cold, "under preemption"
        harness.settle()
        assert sum(stats.num_preemptions for stats in harness.finished) >= 2


def test_only_last_pooling_uses_the_prefix_cache(tmp_path: Path) -> None:
    prompt = prompts_of(2)[1]
    with Harness(config_of(tiny_folder(tmp_path, "llama"))) as harness:
        run = lambda pooling: harness.loop.run_until_complete(_embed(harness, [prompt], pooling))[0][1]  # noqa: E731
        assert run("mean") == 0
        assert run("last") >= 96
        assert run("mean") == 0


def test_a_prompt_may_fill_the_context_and_the_model_still_generates(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    prompt = (prompts_of(2)[1] * 6)[:600]
    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with Harness(config_of(folder)) as harness:
        before = harness.run([prompt[:50]], greedy)[0, 0].token_ids
        assert len(embed(harness, [prompt], "mean")[0]) % 4 == 0
        assert harness.run([prompt[:50]], greedy)[0, 0].token_ids == before
        harness.settle()
        assert {stats.num_output_tokens for stats in harness.finished} == {0, 8}


def test_weights_that_break_give_an_error_not_a_vector(tmp_path: Path) -> None:
    def load(config: EngineConfig) -> EngineParts:
        parts = load_engine(config)
        backbone = parts.runner.backbone
        hidden_states = backbone.hidden_states
        backbone.hidden_states = lambda *args: hidden_states(*args) * torch.nan  # type: ignore[method-assign]
        return parts

    async def one(harness: Harness) -> list[str | None]:
        stream = harness.engine.generate([[5, 6]], SamplingParams(max_tokens=0, pooling="last"))
        return [output.error async for outputs in stream for output in outputs]

    with Harness(config_of(tiny_folder(tmp_path, "llama")), load) as harness:
        (error,) = harness.loop.run_until_complete(one(harness))
    assert error is not None
    assert "finite" in error
