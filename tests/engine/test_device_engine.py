"""A whole engine whose runner is the device's: the same texts as the CPU's engine gives, at depth 2, through the real
loop, with recorded decode steps and without."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import EngineParts, load_engine
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.cuda_graph import DecodeGraphs, decode_buckets
from engine.device_batch import decode_forward
from engine.device_runner import DeviceRunner
from engine.sampling_params import BeamSearch, SamplingParams, StructuredOutput
from engine.scheduler import Scheduler
from tests.engine.delayed_lane import DelayedLane
from tests.engine.harness import Generated, Harness
from tests.engine.preempting import PreemptingScheduler
from tests.engine.run_again import RecorderOfRuns
from tests.ops.device_reference import on_cpu
from tests.tiny import VOCAB_SIZE, tiny_folder

MAX_NUM_SEQS = 12
CHOICE = StructuredOutput("choice", json.dumps(["yes", "no", "maybe so"]))
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)


@pytest.fixture(scope="module", autouse=True)
def reference_ops() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "llama", **SMALL)


def config_of(folder: Path, *, depth: int, budget: int = 512, blocks: int = 200, caching: bool = True) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=192),
        cache=CacheConfig(memory_bytes=blocks * 16 * 512, enable_prefix_caching=caching),
        scheduler=SchedulerConfig(
            max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=budget, max_chunk_tokens=64, pipeline_depth=depth
        ),
    )


def on_device(
    *, recorder: RecorderOfRuns | None = None, scheduler: type[Scheduler] = Scheduler
) -> Callable[[EngineConfig], EngineParts]:
    """As load_engine, with a DeviceRunner over late copies."""

    def load(config: EngineConfig) -> EngineParts:
        parts = load_engine(config)
        backbone, kv_cache = parts.runner.backbone, parts.runner.kv_cache
        lengths, limits = parts.info.max_model_len, config.scheduler
        graphs = None
        if recorder is not None:
            graphs = DecodeGraphs(
                decode_forward(backbone, lengths),
                recorder,
                buckets=decode_buckets(MAX_NUM_SEQS),
                table_width=-(-(lengths + 1) // kv_cache.block_size),
                device=torch.device("cpu"),
            )
            graphs.capture()
        runner = DeviceRunner(
            backbone,
            kv_cache,
            DelayedLane(),
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=lengths,
            vocab_size=parts.info.vocab_size,
            pipeline_depth=limits.pipeline_depth or 1,
            grammars=parts.grammars,
            graphs=graphs,
        )
        runner.warm_up()
        own = scheduler(limits, parts.scheduler.manager, lengths)
        return replace(parts, runner=runner, scheduler=own)

    return load


def requests_of(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of mixed lengths, some sharing a prefix, and options of every kind in turn."""
    rng = random.Random(7)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    own = [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.choice((1, 15, 16, 17, 40)))] for _ in range(count)]
    options: list[dict[str, Any]] = [
        dict(temperature=0.0, logprobs=2),
        dict(temperature=1.0, top_p=0.8, n=3, logprobs=0),
        dict(temperature=1.3, top_k=20, presence_penalty=1.0, frequency_penalty=0.5, logprobs=3),
        dict(temperature=1.0, repetition_penalty=1.3, min_p=0.02, logprobs=2, logprobs_mode="processed"),
        dict(temperature=0.7, logit_bias=((7, 4.0), (8, -100.0)), stop_token_ids=tuple(range(100, 140))),
        dict(temperature=1.0, structured=CHOICE),
        dict(temperature=1.0, min_tokens=5, stop_token_ids=tuple(range(3, 200)), prompt_logprobs=1),
        dict(n=2, beam=BeamSearch(3)),
    ]
    params = [SamplingParams(max_tokens=14, seed=i, **options[i % len(options)]) for i in range(count)]
    return [shared + tail if i % 3 == 0 else tail for i, tail in enumerate(own)], params


Result = list[dict[tuple[int, int], Generated]]


def collect(harness: Harness, count: int = 24) -> Result:
    harness.loop.run_until_complete(harness.engine.compile(CHOICE))
    told = harness.run_each(*requests_of(count))
    for texts in told:
        for text in texts.values():
            assert text.error is None
            text.num_cached_tokens = 0  # of what was there before
    return told


@pytest.fixture(scope="module")
def truth(folder: Path) -> Result:
    with Harness(config_of(folder, depth=1)) as harness:
        return collect(harness)


@pytest.mark.parametrize("depth", [1, 2])
def test_texts_are_those_of_the_cpus_engine(folder: Path, truth: Result, depth: int) -> None:
    with Harness(config_of(folder, depth=depth), on_device()) as harness:
        assert collect(harness) == truth
        assert collect(harness) == truth, "with a warm prefix cache"


def test_recorded_steps_change_nothing(folder: Path, truth: Result) -> None:
    recorder = RecorderOfRuns()
    with Harness(config_of(folder, depth=2), on_device(recorder=recorder)) as harness:
        assert collect(harness) == truth
    assert sum(graph.num_replays > 0 for graph in recorder.recorded) >= 3, "several buckets were in use"


def test_small_chunks_and_little_memory_change_nothing(folder: Path, truth: Result) -> None:
    with Harness(config_of(folder, depth=2, budget=32, blocks=14, caching=False), on_device()) as harness:
        assert collect(harness) == truth
        harness.settle()
        assert max(stats.num_preemptions for stats in harness.finished) > 0


def test_preemption_while_steps_run_changes_nothing(folder: Path, truth: Result) -> None:
    load = on_device(recorder=RecorderOfRuns(), scheduler=PreemptingScheduler)
    with Harness(config_of(folder, depth=2), load) as harness:
        assert collect(harness) == truth
        harness.settle()
        assert min(stats.num_preemptions for stats in harness.finished if stats.num_output_tokens > 12) > 0
