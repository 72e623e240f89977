"""What an engine took is given back when it stops, not when the garbage collector happens to run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import decoder_ops
from engine.assembly import EngineParts, load_engine, plan
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.models.backbone import Backbone
from engine.sampling_params import SamplingParams
from tests.engine.harness import Harness
from tests.engine.recipes import RECIPES, backbones, draw_tensors
from tests.tiny import tiny_folder


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def config_of(folder: Path, cache: Path, *, budget: int = 64) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), cache_dir=str(cache), dtype="float32"),
        cache=CacheConfig(memory_bytes=4 << 20),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=budget, max_chunk_tokens=budget),
    )


def test_a_stopped_engine_holds_nothing(tmp_path: Path) -> None:
    """The first start goes through transformers' modules, the second does not."""
    folder = tiny_folder(tmp_path, "qwen3")
    for _ in range(2):
        parts: list[weakref.ref[object]] = []

        def load(config: EngineConfig, parts: list[weakref.ref[object]] = parts) -> EngineParts:
            loaded = load_engine(config)
            backbone = loaded.runner.backbone
            parts += map(
                weakref.ref, (loaded.runner, loaded.runner.kv_cache, loaded.scheduler, backbone, backbone.model)
            )
            return loaded

        with Harness(config_of(folder, tmp_path / "cache"), load) as harness:
            answers = harness.run([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
            assert len(answers[0, 0].token_ids) == 4
            assert all(part() is not None for part in parts)
        assert [part() for part in parts] == [None] * 5
        assert harness.engine.model_info.vocab_size  # facts stay


def test_a_decoder_ends_with_its_model() -> None:
    native, _ = backbones(RECIPES["plain"], draw_tensors(RECIPES["plain"], torch.float32))
    handle = native.model.decoder.handle  # type: ignore[attr-defined]  # of FusedModel
    assert decoder_ops.step_bytes(handle, 1, 1) > 0
    ended: list[weakref.ref[Backbone]] = [weakref.ref(native)]
    del native
    assert ended[0]() is None
    with pytest.raises(RuntimeError, match="wanted one from decoder_create"):
        decoder_ops.step_bytes(handle, 1, 1)


def test_a_step_is_part_of_the_plan(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    plans = [plan(config_of(folder, tmp_path / "cache", budget=budget)) for budget in (64, 640)]
    logits = 4 * 4 * plans[0].info.vocab_size
    assert plans[0].step_bytes > logits
    assert plans[1].step_bytes - logits > 9 * (plans[0].step_bytes - logits)
