"""What a device's engine is put together from: the step that is tried out before the pool is made, pool, runner."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import assembly, device_parts
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig, StartError
from engine.cuda_graph import decode_buckets
from engine.device import CPU, HOST, Device
from engine.device_parts import Sizes, largest_step
from engine.kv.manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Request
from tests.engine.harness import Harness
from tests.engine.run_again import RecorderOfRuns
from tests.ops.device_reference import on_cpu
from tests.tiny import tiny_folder

ON_HOST = assembly._on_host
SIZES = Sizes(
    max_num_seqs=4, max_num_batched_tokens=100, max_model_len=64, vocab_size=50, pipeline_depth=2, block_size=16
)


def test_it_fills_the_budget_and_all_rows() -> None:
    step = largest_step(SIZES)
    assert [row.num_scheduled for row in step.rows] == [64, 34, 1, 1]
    assert step.num_tokens == 100
    assert [len(new.block_tables[0]) for new in step.new_rows] == [4, 3, 1, 1]
    assert all(row.logits_from == index for index, row in enumerate(step.rows))
    assert pickle.loads(pickle.dumps(step)) == step


def test_a_budget_that_no_rows_can_fill() -> None:
    step = largest_step(replace(SIZES, max_num_batched_tokens=10_000))
    assert [row.num_scheduled for row in step.rows] == [64] * 4


def test_room_for_the_longest_sequence_and_the_token_behind_it() -> None:
    assert SIZES.table_width == 5
    assert replace(SIZES, max_model_len=63).table_width == 4


@given(
    num_seqs=st.integers(1, 12),
    budget=st.integers(1, 90),
    max_model_len=st.integers(2, 60),
    prompts=st.lists(st.integers(1, 58), min_size=1, max_size=20),
)
@settings(max_examples=60, deadline=None)
def test_no_scheduled_step_is_larger(num_seqs: int, budget: int, max_model_len: int, prompts: list[int]) -> None:
    budget = max(budget, num_seqs)
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=budget)
    scheduler = Scheduler(config, KVCacheManager(256, 16), max_model_len)
    for stream, length in enumerate(prompts):
        if length < max_model_len:
            scheduler.add(Request(stream, 0, [1] * length, SamplingParams(max_tokens=1), seed=0))
    batch = scheduler.schedule(0.0)
    most = largest_step(
        replace(SIZES, max_num_seqs=num_seqs, max_num_batched_tokens=budget, max_model_len=max_model_len)
    )
    assert most.num_tokens <= budget
    assert max(row.num_scheduled for row in most.rows) <= max_model_len
    if batch is not None:
        assert batch.num_tokens <= most.num_tokens
        assert len(batch.rows) <= len(most.rows)


# ---- a whole engine put together as for a device, whose tensors lie on the CPU

MIB = 1 << 20
DEVICE = Device(HOST, "a device", memory_total=64 * MIB, capability=(9, 0))
PROMPTS = [[5, 6, 7], list(range(3, 40)), [9]]
PARAMS = SamplingParams(max_tokens=12, temperature=1.0, seed=3, presence_penalty=0.5, ignore_eos=True)


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecorderOfRuns]:
    """load_engine builds for DEVICE, of which others have 10 MiB; steps take 20 MiB, weights included."""
    recorder = RecorderOfRuns()
    monkeypatch.setattr(assembly, "choose_device", lambda name: DEVICE)
    monkeypatch.setattr(assembly, "_on_host", assembly._on_device)
    monkeypatch.setattr(Device, "free_memory", lambda device: 42 * MIB)
    monkeypatch.setattr(device_parts, "_reserved", lambda device: 12 * MIB)
    monkeypatch.setattr(device_parts, "_peak", lambda device, run: (run(), 20 * MIB)[1])
    monkeypatch.setattr(device_parts, "CudaRecorder", lambda device: recorder)
    with on_cpu():
        yield recorder


def config_of(parent: Path, **cache: Any) -> EngineConfig:
    folder = tiny_folder(parent, "qwen3")
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32"),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=128, pipeline_depth=2),
    )


def test_an_engine_is_put_together_as_for_a_device(on_a_device: RecorderOfRuns, tmp_path: Path) -> None:
    config = config_of(tmp_path, gpu_memory_utilization=0.75)
    with Harness(config) as harness:
        got = harness.run(PROMPTS, PARAMS)
        info = harness.engine.model_info
        assert harness.engine._loop._scheduler.pipeline_depth == 2
    per_block = 16 * info.kv_bytes_per_token
    assert info.num_blocks == (64 * 3 // 4 - 10 - 20 - 8) * MIB // per_block  # 8 beside what is there at rest
    assert info.numeric_profile["device"] == "a device"
    assert info.numeric_profile["isa"] == "sm_90"
    assert len(on_a_device.recorded) == len(decode_buckets(6))
    assert sum(graph.num_replays for graph in on_a_device.recorded) > 0
    with pytest.MonkeyPatch.context() as undone:
        undone.setattr(assembly, "choose_device", lambda name: CPU)
        undone.setattr(assembly, "_on_host", ON_HOST)
        with Harness(config) as harness:
            expected = harness.run(PROMPTS, PARAMS)
    assert {key: text.token_ids for key, text in got.items()} == {key: t.token_ids for key, t in expected.items()}


def test_nothing_is_recorded_where_that_is_wanted(on_a_device: RecorderOfRuns, tmp_path: Path) -> None:
    with Harness(replace(config_of(tmp_path), device=DeviceConfig(enforce_eager=True))) as harness:
        got = harness.run(PROMPTS, PARAMS)
    assert not on_a_device.recorded
    assert [len(text.token_ids) for text in got.values()] == [12, 12, 12]


def test_max_model_len_is_cut_to_the_pool(
    on_a_device: RecorderOfRuns, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []
    measure = device_parts.measure
    monkeypatch.setattr(
        device_parts, "measure", lambda b, d, sizes, g: (tried.append(sizes.max_model_len), measure(b, d, sizes, g))[1]
    )
    with Harness(config_of(tmp_path, memory_bytes=4 * 16 * 512 + 100)) as harness:
        info = harness.engine.model_info
        assert info.max_model_len == info.num_blocks * 16 == 64
        assert harness.run([[5]], PARAMS)[0, 0].finish_reason == "length"
    assert tried == [64], "no tables are made for lengths that no pool could hold"
    assert "max_model_len is cut from 1024 to the 64 tokens the KV pool holds" in caplog.text


@pytest.mark.parametrize("place", ["launch", "record"])
def test_a_full_device_is_told_in_one_sentence(
    place: str, on_a_device: RecorderOfRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    if place == "launch":
        monkeypatch.setattr(device_parts.DeviceRunner, "launch", full)
        sentence = (
            "A step of --max-num-batched-tokens 128 and --max-num-seqs 6 does not fit into the memory of a device"
        )
    else:
        monkeypatch.setattr(RecorderOfRuns, "record", full)
        sentence = "The memory of a device is full before the first request; lower --gpu-memory-utilization."
    with pytest.raises(StartError) as refused:
        assembly.load_engine(config_of(tmp_path))
    assert str(refused.value).startswith(sentence)


def test_a_fault_that_is_no_lack_of_memory_is_not_dressed_up(
    on_a_device: RecorderOfRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_parts, "largest_step", lambda sizes: raise_it(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        assembly.load_engine(config_of(tmp_path))


def raise_it(error: Exception) -> Any:
    raise error
