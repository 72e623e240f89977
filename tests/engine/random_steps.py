"""Random schedules for the two runners: requests with every option, over a tiny model with a token that breaks it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.assembly import load_engine
from engine.beam import num_blocks_needed
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.cuda_graph import DecodeGraphs, decode_buckets
from engine.device import HostLane
from engine.device_batch import decode_forward
from engine.sampling_params import BeamSearch, ReasoningMarks, SamplingParams, StructuredOutput
from tests.engine.delayed_lane import DelayedLane
from tests.engine.lockstep import Driver, Pair
from tests.engine.run_again import RecorderOfRuns
from tests.tiny import VOCAB_SIZE, tiny_folder

BROKEN = 5  # a token whose embedding is NaN
MAX_MODEL_LEN = 112
BLOCK_SIZE = 16
LEAST_BLOCKS = -(-MAX_MODEL_LEN // BLOCK_SIZE)
SMALL: dict[str, Any] = dict(
    hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16
)
FORMS = (
    StructuredOutput("choice", json.dumps(["yes", "no", "maybe so"])),
    StructuredOutput("regex", "[ab]{2,9}c"),
    StructuredOutput("json", json.dumps({"type": "array", "items": {"type": "boolean"}, "maxItems": 3})),
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tiny_folder(
        tmp_path_factory.mktemp("models"), "llama", tie_word_embeddings=False, num_hidden_layers=2, **SMALL
    )
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=MAX_MODEL_LEN),
        cache=CacheConfig(block_size=BLOCK_SIZE, memory_bytes=4 << 20),
        scheduler=SchedulerConfig(max_num_seqs=8),
    )
    pair = Pair(load_engine(config), load_engine(config)).learn(FORMS)
    for parts in (pair.plain, pair.device):
        parts.runner.backbone.model._embedding[BROKEN] = torch.nan  # type: ignore[attr-defined]  # of a FusedModel
    yield pair
    pair.close()


def random_prompt(rng: random.Random, stems: list[list[int]]) -> list[int]:
    stem = rng.choice(stems)
    tail = [rng.randrange(6, VOCAB_SIZE) for _ in range(rng.choice([0, 1, 3, 15, 16, 17, 30]))]
    prompt = stem[: rng.randrange(len(stem) + 1)] + tail
    if rng.random() < 0.04:
        prompt.append(BROKEN)
    return prompt or [rng.randrange(6, VOCAB_SIZE)]


def random_params(rng: random.Random, forms: tuple[StructuredOutput, ...]) -> SamplingParams:
    """Every option now and then, most of them rarely."""

    def maybe(chance: float, *values: Any, otherwise: Any) -> Any:
        return rng.choice(values) if rng.random() < chance else otherwise

    max_tokens = rng.choice([0, 1, 2, 5, 9, 20])
    options: dict[str, Any] = dict(
        n=maybe(0.3, 2, 3, otherwise=1),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, maybe(0.2, 3, otherwise=0)),
        temperature=maybe(0.4, 0.0, otherwise=rng.choice([0.3, 1.0, 5.0])),
        top_k=maybe(0.3, 1, 5, 40, otherwise=0),
        top_p=maybe(0.3, 0.1, 0.8, otherwise=1.0),
        min_p=maybe(0.2, 0.05, otherwise=0.0),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=maybe(0.5, tuple(range(40, 80)), otherwise=()),
        presence_penalty=maybe(0.15, 1.5, -1.0, otherwise=0.0),
        frequency_penalty=maybe(0.15, 0.7, otherwise=0.0),
        repetition_penalty=maybe(0.15, 1.3, 0.8, otherwise=1.0),
        logit_bias=maybe(0.2, ((7, 6.0), (9, -100.0)), otherwise=()),
        logprobs=maybe(0.3, 0, 3, otherwise=None),
        prompt_logprobs=maybe(0.15, 0, 2, otherwise=None),
    )
    if options["logprobs"] is not None:
        options["logprobs_mode"] = rng.choice(["raw", "processed"])
        options["logprob_token_ids"] = maybe(0.3, (3, 70, 3), otherwise=())
    kind = rng.random()
    if kind < 0.15 and forms:
        options["structured"] = rng.choice(forms)  # beside min_tokens: a form may leave nothing but the end
        if rng.random() < 0.3:
            options["reasoning"] = ReasoningMarks("<", ">", opened=rng.random() < 0.5)
    elif kind < 0.3 and max_tokens:
        width = rng.choice([1, 2, 4])
        return SamplingParams(
            n=rng.randint(1, width),
            max_tokens=max_tokens,
            logprobs=options["logprobs"],
            ignore_eos=options["ignore_eos"],
            beam=BeamSearch(width, early_stopping=rng.choice([True, False])),
        )
    elif kind < 0.36:
        return SamplingParams(max_tokens=0, pooling=rng.choice(["last", "mean"]))
    return SamplingParams(**options)


def fits(params: SamplingParams, num_prompt_tokens: int, max_num_seqs: int, num_blocks: int) -> bool:
    if params.beam is None:
        return True
    needed = num_blocks_needed(params.beam, num_prompt_tokens, params.max_tokens or 1, BLOCK_SIZE)
    return params.beam.width <= max_num_seqs and needed <= num_blocks


def graphs_of(pair: Pair, max_num_seqs: int) -> DecodeGraphs:
    graphs = DecodeGraphs(
        decode_forward(pair.device.runner.backbone, MAX_MODEL_LEN),
        RecorderOfRuns(),
        buckets=decode_buckets(max_num_seqs),
        table_width=-(-(MAX_MODEL_LEN + 1) // BLOCK_SIZE),
        device=torch.device("cpu"),
    )
    graphs.capture()
    return graphs


def play(
    pair: Pair, seed: int, *, depth: int, lane: HostLane | None = None, recorded: bool = False, num_turns: int = 25
) -> Driver:
    rng = random.Random(seed)
    max_num_seqs = rng.choice([2, 4, 8])
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.choice([16, 40, 200]),
        max_chunk_tokens=rng.choice([5, 16, 100]),
        pipeline_depth=depth,
    )
    num_blocks = LEAST_BLOCKS + rng.choice([0, 2, 30])
    graphs = graphs_of(pair, max_num_seqs) if recorded else None
    runner = pair.runners(config, MAX_MODEL_LEN, lane=lane, graphs=graphs)
    driver = Driver(runner, config, num_blocks, MAX_MODEL_LEN, caching=rng.random() < 0.7)
    stems = [[rng.randrange(6, VOCAB_SIZE) for _ in range(rng.choice([5, 32, 50]))] for _ in range(2)]
    for _ in range(num_turns):
        for _ in range(rng.choice([0, 0, 1, 2])):
            prompt, params = random_prompt(rng, stems), random_params(rng, pair.forms)
            if fits(params, len(prompt), max_num_seqs, num_blocks):
                driver.add(prompt, params, seed=rng.randrange(100))
        if rng.random() < 0.05 and driver.texts:
            driver.abort(rng.choice(list(driver.texts))[0])
        if rng.random() < 0.05:
            driver.scheduler.preempt_all()
        driver.step()
    driver.run()
    return driver


def driver_of(pair: Pair, *, depth: int = 2, budget: int = 64, lane: HostLane | None = None) -> Driver:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=budget, pipeline_depth=depth)
    runner = pair.runners(config, MAX_MODEL_LEN, lane=lane or DelayedLane())
    return Driver(runner, config, 60, MAX_MODEL_LEN)
