"""From an `EngineConfig` to the parts of a running engine: model, KV pool, scheduler, runner, facts.

The one place where the storeys meet; runs once, in the engine thread.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

import torch

from engine import ops
from engine.attention.select import select
from engine.batch import ScheduledBatch
from engine.config import EngineConfig, SchedulerConfig, StartError
from engine.device import Device, choose_device, is_out_of_memory
from engine.device_parts import Sizes, ready_runner, size_pool
from engine.kv.cache import KVCache, bytes_per_token, num_blocks_for
from engine.kv.manager import KVCacheManager
from engine.loop import Handle
from engine.models.backbone import Backbone
from engine.models.loader import LoadedModel, load_model
from engine.models.stopwatch import Stopwatch
from engine.outputs import ModelInfo
from engine.progress import Progress
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.structured import GrammarStore
from engine.tokenizer import Tokenizer

logger = logging.getLogger("pagemill.engine")


class LoadedRunner(Protocol):
    """ModelRunner on the CPU, DeviceRunner on a device."""

    backbone: Backbone
    kv_cache: KVCache

    def launch(self, batch: ScheduledBatch) -> Handle: ...


@dataclass(frozen=True, slots=True)
class EngineParts:
    runner: LoadedRunner
    scheduler: Scheduler
    tokenizer: Tokenizer
    info: ModelInfo
    grammars: GrammarStore | None = None  # None: no structured output
    step_bytes: int = 0  # of the largest step, as far as the model tells


@dataclass(frozen=True, slots=True)
class Plan:
    """What `pagemill check` prints: where the memory goes and how many sequences it holds."""

    info: ModelInfo
    weight_bytes: int
    kv_pool_bytes: int
    step_bytes: int  # of the largest step: activations and logits
    num_pool_tokens: int

    def concurrent_sequences(self, length: int) -> int:
        """Sequences of `length` tokens that the pool holds at once, nothing shared."""
        info = self.info
        return info.num_blocks // -(-length // info.block_size)


def load_engine(config: EngineConfig, progress: Progress | None = None) -> EngineParts:
    """Load, size the pool, build and warm up; `progress` is told how far it is. Raises StartError with one
    sentence."""
    try:
        return _load_engine(config, choose_device(config.device.device), Stopwatch(progress))
    except MemoryError as error:
        raise StartError("There is too little memory to load this model.") from error
    except RuntimeError as error:  # torch's allocators
        if is_out_of_memory(error) or "not enough memory" in str(error) or "can't allocate memory" in str(error):
            raise StartError("There is too little memory to load this model.") from error
        raise


def _load_engine(config: EngineConfig, device: Device, watch: Stopwatch) -> EngineParts:
    if device.is_cuda:
        torch.cuda.set_device(device.torch_device)  # of this thread, which alone computes
    torch.set_num_threads(config.device.compute_threads())
    _select_isa(config.device.cpu_isa)
    backend = select(config.device.attention_backend, device)
    model = load_model(config.model, config.device, backend=backend, lora=config.lora, device=device, watch=watch)
    vocab_size = min(model.backbone.vocab_size, model.tokenizer.vocab_size)
    eos_token_ids = _within(model.eos_token_ids, vocab_size)
    grammars = GrammarStore(model.tokenizer, vocab_size, eos_token_ids, config.structured)
    sizes = Sizes(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=_wanted_model_len(config, model),
        vocab_size=vocab_size,
        pipeline_depth=config.scheduler.pipeline_depth or (2 if device.is_cuda else 1),
        block_size=config.cache.block_size,
        may_record=not config.device.enforce_eager,
    )
    build = _on_device if device.is_cuda else _on_host
    runner, max_model_len, step_bytes = build(config, model.backbone, device, sizes, grammars, watch)
    num_blocks = runner.kv_cache.num_blocks
    info = _describe(config, model, device, max_model_len, vocab_size, eos_token_ids, num_blocks, watch.seconds)
    config = replace(config, scheduler=replace(config.scheduler, pipeline_depth=sizes.pipeline_depth))
    return EngineParts(runner, new_scheduler(config, info), model.tokenizer, info, grammars, step_bytes)


def _on_host(
    config: EngineConfig,
    backbone: Backbone,
    device: Device,
    sizes: Sizes,
    grammars: GrammarStore,
    watch: Stopwatch,
) -> tuple[LoadedRunner, int, int]:
    """(runner, max_model_len, bytes of the largest step)."""
    wanted = sizes.max_num_seqs * sizes.max_model_len
    step_bytes = _largest_step(config.scheduler, backbone)
    num_blocks = num_blocks_for(config.cache, backbone.layers, backbone.dtype, wanted, step_bytes)
    max_model_len = _cap_to_pool(sizes.max_model_len, num_blocks * sizes.block_size)
    with watch.phase("kv_pool"):
        kv_cache = KVCache(backbone.layers, num_blocks, sizes.block_size, backbone.dtype)
    runner = ModelRunner(
        backbone,
        kv_cache,
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=max_model_len,
        vocab_size=sizes.vocab_size,
        grammars=grammars,
    )
    with watch.phase("warm_up"):
        runner.warm_up(sizes.max_num_batched_tokens)
    return runner, max_model_len, step_bytes


def _on_device(
    config: EngineConfig,
    backbone: Backbone,
    device: Device,
    sizes: Sizes,
    grammars: GrammarStore,
    watch: Stopwatch,
) -> tuple[LoadedRunner, int, int]:
    """As _on_host. Rotary tables are made whole first: a recorded step knows where they lie."""
    wanted = sizes.max_model_len
    room = (config.cache.memory_bytes or device.free_memory()) // bytes_per_token(backbone.layers, backbone.dtype)
    sizes = replace(sizes, max_model_len=max(2, min(wanted, room)))  # for no length that no pool could hold
    backbone.model.cover(sizes.max_model_len)
    with watch.phase("kv_pool"):
        num_blocks, memory = size_pool(backbone, device, sizes, config.cache, grammars)
    max_model_len = min(sizes.max_model_len, _cap_to_pool(wanted, num_blocks * sizes.block_size))
    sizes = replace(sizes, max_model_len=max_model_len)
    with watch.phase("warm_up"):
        kv_cache = KVCache(backbone.layers, num_blocks, sizes.block_size, backbone.dtype, device.torch_device)
        runner = ready_runner(backbone, kv_cache, device, sizes, grammars)
    return runner, sizes.max_model_len, max(0, memory.peak_reserved + memory.beside_steps - backbone.weight_bytes)


def _select_isa(name: str) -> None:
    levels = ops.isa_levels()
    if name not in ("auto", *levels):
        raise StartError(f"--cpu-isa {name} is not to be had here; this machine and build have {', '.join(levels)}.")
    ops.set_isa(name)


def new_scheduler(config: EngineConfig, info: ModelInfo) -> Scheduler:
    """A scheduler over a fresh, empty pool of info.num_blocks blocks."""
    manager = KVCacheManager(
        info.num_blocks, info.block_size, enable_prefix_caching=config.cache.enable_prefix_caching
    )
    return Scheduler(config.scheduler, manager, info.max_model_len)


def plan(config: EngineConfig) -> Plan:
    """Load the model and report what it takes. Raises StartError."""
    parts = load_engine(config)
    backbone = parts.runner.backbone
    return Plan(
        info=parts.info,
        weight_bytes=backbone.weight_bytes,
        kv_pool_bytes=parts.runner.kv_cache.num_bytes,
        step_bytes=parts.step_bytes,
        num_pool_tokens=parts.info.num_blocks * parts.info.block_size,
    )


def _largest_step(config: SchedulerConfig, backbone: Backbone) -> int:
    """Bytes, as far as the model tells."""
    return backbone.model.step_bytes(config.max_num_batched_tokens, config.max_num_seqs)


def _wanted_model_len(config: EngineConfig, model: LoadedModel) -> int:
    wanted = config.model.max_model_len
    if wanted is None:
        return model.max_position
    if wanted > model.max_position:
        raise StartError(
            f"--max-model-len {wanted} is longer than the {model.max_position} tokens this model was made for."
        )
    return wanted


def _cap_to_pool(max_model_len: int, pool_tokens: int) -> int:
    if pool_tokens < max_model_len:
        logger.warning("max_model_len is cut from %d to the %d tokens the KV pool holds", max_model_len, pool_tokens)
    return min(max_model_len, pool_tokens)


def _describe(
    config: EngineConfig,
    model: LoadedModel,
    device: Device,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    num_blocks: int,
    seconds: dict[str, float],
) -> ModelInfo:
    backbone = model.backbone
    profile = {
        "device": device.name,
        "isa": ops.isa() if device.capability is None else "sm_{}{}".format(*device.capability),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "quantization": backbone.quantization,
        "attention_backend": config.device.attention_backend,
        "parallel_size": "1",
        "pagemill": _version("pagemill"),
        "kernels": _kernels(device),
        "torch": torch.__version__,
    }
    spelled = "\n".join(f"{key}={value}" for key, value in sorted(profile.items()))
    return ModelInfo(
        name=model.name,
        source=model.source,
        architecture=model.architecture,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=profile["dtype"],
        num_parameters=backbone.num_parameters,
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        kv_bytes_per_token=bytes_per_token(backbone.layers, backbone.dtype),
        num_threads=torch.get_num_threads(),
        hidden_size=backbone.hidden_size,
        quantization=backbone.quantization,
        numeric_profile=profile,
        system_fingerprint="fp_" + hashlib.blake2b(spelled.encode(), digest_size=6).hexdigest(),
        batch_invariant=backbone.batch_invariant,
        sampling_defaults=model.sampling_defaults,
        load_seconds=seconds,
    )


def _kernels(device: Device) -> str:
    """Tells builds of the library that computes apart."""
    library = ops.CUDA_LIBRARY if device.is_cuda and ops.CUDA_LIBRARY is not None else ops.LIBRARY
    return hashlib.blake2b(library.read_bytes(), digest_size=8).hexdigest()


def _within(eos_token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """Without ids that no token can have: files name them by mistake."""
    known = tuple(token_id for token_id in eos_token_ids if 0 <= token_id < vocab_size)
    if known != eos_token_ids:
        logger.warning("end-of-sequence ids outside the vocabulary are ignored: %s", set(eos_token_ids) - set(known))
    return known


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "0+source"
