"""A request's tokens and logprobs do not depend on its neighbours, on chunking, on the prefix cache, on preemption
or on the number of threads, bit for bit: greedy and seeded, float32, bfloat16 and quantised.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, Quantization, SchedulerConfig
from engine.sampling_params import SamplingParams
from tests.engine.harness import Generated, Harness
from tests.engine.preempting import load_preempting
from tests.models import model_file
from tests.tiny import VOCAB_SIZE, tiny_folder

NUM_NEW = 16
Result = list[tuple[list[int], list[float]]]


def config_of(
    model: Path,
    dtype: str,
    *,
    quantization: Quantization = "none",
    budget: int = 2048,
    chunk: int = 512,
    caching: bool = True,
    threads: int = 2,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(
            model=str(model),
            dtype=dtype,  # type: ignore[arg-type]  # parametrised
            quantization=quantization,
            max_model_len=1000,
        ),
        cache=CacheConfig(memory_bytes=400 << 20, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=budget, max_chunk_tokens=chunk),
        device=DeviceConfig(num_threads=threads),
    )


def requests_of(vocab_size: int, count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths, some sharing a prefix; greedy and seeded in turn."""
    rng = random.Random(5)
    shared = [rng.randrange(3, vocab_size) for _ in range(70)]
    prompts, params = [], []
    for i in range(count):
        own = [rng.randrange(3, vocab_size) for _ in range(rng.choice((1, 15, 16, 17, 40, 130)))]
        prompts.append(shared + own if i % 3 == 0 else own)
        params.append(
            SamplingParams(
                max_tokens=NUM_NEW, temperature=0.0 if i % 2 else 0.9, top_p=0.95, seed=i, ignore_eos=True, logprobs=2
            )
        )
    return prompts, params


def collect(harness: Harness, prompts: list[list[int]], params: list[SamplingParams]) -> Result:
    def row(result: dict[tuple[int, int], Generated]) -> tuple[list[int], list[float]]:
        assert result[0, 0].error is None
        return result[0, 0].token_ids, result[0, 0].logprobs

    return [row(r) for r in harness.run_each(prompts, params)]


def check(model: Path, dtype: str, *, sizes: tuple[int, ...], alone: int, quantization: Quantization = "none") -> None:
    """`alone` requests run one by one give the truth for their place in every batch."""
    with Harness(config_of(model, dtype, quantization=quantization)) as harness:
        assert (harness.engine.model_info.quantization == "none") == (quantization == "none")
        prompts, params = requests_of(harness.engine.model_info.vocab_size, max(sizes))
        assert harness.engine.model_info.batch_invariant
        truth = [collect(harness, [p], [q])[0] for p, q in zip(prompts[:alone], params, strict=False)]
        for size in sizes:  # warm by now
            got = collect(harness, prompts[:size], params[:size])
            assert got[:alone] == truth[:size], f"batch of {size}"
    for budget, chunk, caching, threads in ((64, 16, False, 2), (2048, 512, False, 1), (64, 16, True, 1)):
        config = config_of(
            model,
            dtype,
            quantization=quantization,
            budget=budget,
            chunk=chunk,
            caching=caching,
            threads=threads,
        )
        with Harness(config) as harness:
            got = collect(harness, prompts, params)
            assert got[:alone] == truth, f"budget {budget}, chunk {chunk}, caching {caching}, threads {threads}"
    with Harness(config_of(model, dtype, quantization=quantization), load_preempting) as harness:
        got = collect(harness, prompts, params)
        harness.settle()
        assert min(stats.num_preemptions for stats in harness.finished) >= 1
        assert got[:alone] == truth, "under preemption"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3", "glm4_moe"])
def test_tiny_models_are_batch_invariant(kind: str, dtype: str, tmp_path: Path) -> None:
    check(tiny_folder(tmp_path, kind), dtype, sizes=(2, 7, 33, 64), alone=12)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_models_are_batch_invariant(quantization: Quantization, tmp_path: Path) -> None:
    check(tiny_folder(tmp_path, "llama"), "bfloat16", sizes=(2, 7, 33, 64), alone=12, quantization=quantization)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("quantization", ["int8", "auto"])
def test_a_real_quantised_model_is_batch_invariant(quantization: Quantization) -> None:
    check(model_file("smollm2"), "bfloat16", sizes=(2, 7, 33, 64), alone=6, quantization=quantization)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models_are_batch_invariant(name: str, dtype: str) -> None:
    check(model_file(name), dtype, sizes=(2, 7, 33, 64), alone=6)


def test_one_request_does_not_depend_on_how_it_was_asked(tmp_path: Path) -> None:
    """n sequences of one request equal the same sequences in a list of prompts only where the key is the same."""
    model = tiny_folder(tmp_path, "llama")
    params = SamplingParams(n=3, max_tokens=NUM_NEW, temperature=1.0, seed=3, ignore_eos=True)
    prompt = [random.Random(1).randrange(3, VOCAB_SIZE) for _ in range(37)]
    with Harness(config_of(model, "float32")) as harness:
        three = harness.run([prompt], params)
        again = harness.run([prompt], params)
        single = harness.run([prompt], replace(params, n=1))
    assert {k: v.token_ids for k, v in three.items()} == {k: v.token_ids for k, v in again.items()}
    assert three[0, 0].token_ids == single[0, 0].token_ids
    assert len({tuple(v.token_ids) for v in three.values()}) == 3
