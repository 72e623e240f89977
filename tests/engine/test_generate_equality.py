"""Token-for-token equality with transformers.generate in float32: the paged engine changes nothing.

Every prompt runs alone and with all others, chunked and unchunked, with a cold and a warm prefix cache, and with
every sequence preempted at least once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.models.source import resolve_source
from engine.models.weights import open_weights
from engine.sampling_params import SamplingParams
from tests.engine.harness import Generated, Harness
from tests.engine.preempting import load_preempting
from tests.models import MODELS, model_file

NUM_NEW = 64
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 511, 512, 513, 1500)
TEXTS = (
    "Once upon a time, there was a little girl who",
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Water boils at a temperature of",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 1, 2, 3, 5, 8, 13,",
    "Příliš žluťoučký kůň úpěl ďábelské ódy.",
    "The three laws of thermodynamics state that",
    "In the beginning",
)


def config_of(path: Path, *, budget: int = 2048, chunk: int = 2048, prefix_caching: bool = True) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(path), dtype="float32", max_model_len=2048),
        cache=CacheConfig(memory_bytes=1 << 30, enable_prefix_caching=prefix_caching),
        scheduler=SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=budget, max_chunk_tokens=chunk),
    )


def prompts_of(harness: Harness) -> list[list[int]]:
    tokenizer = harness.engine.tokenizer
    generator = torch.Generator().manual_seed(11)
    high = min(20_000, harness.engine.model_info.vocab_size)
    drawn = [torch.randint(300, high, (n,), generator=generator).tolist() for n in LENGTHS]
    return drawn + [tokenizer.encode(text) for text in TEXTS]


def reference_model(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own model, its own attention and cache, over the same weights in `dtype`."""
    weights = open_weights(resolve_source(str(path)))
    config = AutoConfig.for_model(**weights.hf_config)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    missing, unexpected = model.load_state_dict(dict(weights.tensors(dtype)), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}  # tied to the embedding
    model.tie_weights()
    model.generation_config.eos_token_id = None  # generates all NUM_NEW, as ignore_eos does
    return model.eval()


@pytest.fixture(scope="module", params=sorted(MODELS))
def expected(request: pytest.FixtureRequest) -> tuple[Path, list[list[int]], list[list[int]]]:
    """(model file, prompts, what generate makes of them)."""
    path = model_file(request.param)
    with Harness(config_of(path)) as harness:
        prompts = prompts_of(harness)
    model = reference_model(path)
    answers = []
    with torch.inference_mode():
        for prompt in prompts:
            out = model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=NUM_NEW,
                do_sample=False,
                repetition_penalty=1.0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return path, prompts, answers


def tokens(result: dict[tuple[int, int], Generated]) -> list[list[int]]:
    return [result[key].token_ids for key in sorted(result)]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("budget", "prefix_caching"), [(2048, True), (64, True), (64, False)])
def test_equals_generate(
    expected: tuple[Path, list[list[int]], list[list[int]]], budget: int, prefix_caching: bool
) -> None:
    path, prompts, answers = expected
    with Harness(config_of(path, budget=budget, chunk=budget, prefix_caching=prefix_caching)) as harness:
        together = tokens(harness.run(prompts, GREEDY))
        alone = [tokens(harness.run([prompt], GREEDY))[0] for prompt in prompts]
        warm = tokens(harness.run(prompts, GREEDY))
        harness.settle()
        hits = harness.steps[-1].cache.prefix_hits_total
    assert together == answers
    assert alone == answers
    assert warm == answers
    assert (hits > 0) == prefix_caching


@pytest.mark.slow
@pytest.mark.model
def test_equals_generate_under_preemption(expected: tuple[Path, list[list[int]], list[list[int]]]) -> None:
    path, prompts, answers = expected
    with Harness(config_of(path, budget=512, chunk=512), load_preempting) as harness:
        together = tokens(harness.run(prompts, GREEDY))
        harness.settle()
    assert len(harness.finished) == len(prompts)
    assert min(stats.num_preemptions for stats in harness.finished) >= 1
    assert together == answers
