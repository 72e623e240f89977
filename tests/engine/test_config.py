"""EngineConfig: contradictions are refused in a sentence; cores and memory respect the control group."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.config import (
    Adapter,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    SchedulerConfig,
    StartError,
    usable_cores,
)
from engine.memory import cgroup_available, own_cgroup


@pytest.mark.parametrize(
    "fields",
    [
        {"cache": CacheConfig(block_size=8)},
        {"cache": CacheConfig(block_size=0)},
        {"cache": CacheConfig(memory_utilization=0.0)},
        {"scheduler": SchedulerConfig(max_num_seqs=0)},
        {"scheduler": SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=63)},
        {"model": ModelConfig(max_model_len=1)},
        {"device": DeviceConfig(num_threads=0)},
        {"device": DeviceConfig(num_threads=100_000)},
    ],
)
def test_contradictions_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(StartError) as caught:
        EngineConfig(**fields)  # type: ignore[arg-type]  # each value fits its field
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    "adapters",
    [(Adapter("", "a"),), (Adapter("a", ""),), (Adapter("a", "x"), Adapter("b", "y"), Adapter("a", "z"))],
)
def test_adapters_need_names_of_their_own_and_folders(adapters: tuple[Adapter, ...]) -> None:
    with pytest.raises(StartError) as caught:
        LoraConfig(adapters)
    assert str(caught.value).endswith(".")


def test_flat_settings_find_their_section() -> None:
    config = EngineConfig.of(
        model="x", dtype="float32", max_num_seqs=3, block_size=32, num_threads=1, step_timeout_s=5.0
    )
    assert (config.model.model, config.model.dtype, config.scheduler.max_num_seqs) == ("x", "float32", 3)
    assert (config.cache.block_size, config.device.num_threads, config.step_timeout_s) == (32, 1, 5.0)
    assert EngineConfig.of() == EngineConfig()
    adapters = (Adapter("a", "x"), Adapter("b", "x"))
    assert EngineConfig.of(adapters=adapters).lora == LoraConfig(adapters)
    with pytest.raises(TypeError, match="max_seqs"):
        EngineConfig.of(max_seqs=3)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu.max": "6400000 100000"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
    ],
)
def test_cores_respect_the_quota(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    _write(tmp_path, files)
    assert usable_cores(tmp_path) == cores


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        ({"memory.max": "1000", "memory.current": "900"}, 100),
        ({"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 1\ninactive_file 700\n"}, 800),
        ({"memory.max": "1000", "memory.current": "1200"}, 0),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 600\n",
            },
            700,
        ),
    ],
)
def test_memory_respects_the_limit_and_knows_what_the_kernel_can_drop(
    files: dict[str, str], available: int | None, tmp_path: Path
) -> None:
    _write(tmp_path, files)
    assert cgroup_available(tmp_path) == available


def test_the_tightest_group_on_the_way_up_rules(tmp_path: Path) -> None:
    _write(
        tmp_path,
        {
            "memory.max": "max",
            "system.slice/memory.max": "1000",
            "system.slice/memory.current": "600",
            "system.slice/pagemill.service/memory.max": "900",
            "system.slice/pagemill.service/memory.current": "100",
            "cgroup": "1:name=systemd:/x\n0::/system.slice/pagemill.service",
        },
    )
    own = own_cgroup(tmp_path / "cgroup")
    assert own == "system.slice/pagemill.service"
    assert cgroup_available(tmp_path, own) == 400
    assert cgroup_available(tmp_path, "not/there") is None


def _write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
