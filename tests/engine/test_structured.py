"""Structured output through a real engine on a tiny random model: at temperature 2 it writes whatever it may."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.engine.harness import Generated, Harness
from tests.tiny import tiny_folder

PROMPT = [10, 20, 30, 40]
SMALL = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
HOT = SamplingParams(max_tokens=200, temperature=2.0)


def config_of(folder: Path) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=512),
        cache=CacheConfig(memory_bytes=64 << 20),
        scheduler=SchedulerConfig(max_num_seqs=32),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models"), "qwen2")


@pytest.fixture(scope="module")
def harness(folder: Path) -> Any:
    with Harness(config_of(folder)) as harness:
        yield harness


def schema(value: Any, param: str = "structured_outputs") -> StructuredOutput:
    return StructuredOutput("json", json.dumps(value), param)


def run(harness: Harness, params: SamplingParams, prompt: list[int] = PROMPT) -> list[Generated]:
    assert params.structured is not None
    harness.loop.run_until_complete(harness.engine.compile(params.structured))
    return list(harness.run([prompt], params).values())


def text_of(harness: Harness, got: Generated) -> str:
    return harness.engine.tokenizer.decode(got.token_ids)


@pytest.mark.parametrize("seed", range(6))
def test_json_is_of_its_schema(harness: Harness, seed: int) -> None:
    (got,) = run(harness, replace(HOT, structured=schema(SMALL), seed=seed))
    assert got.finish_reason == "stop", got.error
    value = json.loads(text_of(harness, got))
    assert set(value) == {"name", "n"}
    assert isinstance(value["n"], int)
    assert 0 <= value["n"] <= 999
    assert len(value["name"]) <= 8
