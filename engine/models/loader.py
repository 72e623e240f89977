"""From a `ModelConfig` to a loaded model: source, weights, backbone, tokenizer.

Two ways to a backbone. The first start of a model goes through transformers' modelling code and the self-check
(`first_load.py`); if the fused decoder passed, its recipe is kept, and later starts go straight from the weights to
it. Importing the modelling code takes longer than everything else together, so this module does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from engine import ops
from engine.attention.base import AttentionBackend
from engine.config import DeviceConfig, LoraConfig, ModelConfig, StartError
from engine.device import CPU, Device
from engine.memory import available_memory, size_text
from engine.models.backbone import Backbone
from engine.models.config_facts import choose_dtype, sampling_defaults
from engine.models.from_recipe import from_recipe
from engine.models.quantiser import Quantiser
from engine.models.served_size import served_bytes
from engine.models.source import resolve_source
from engine.models.stopwatch import Stopwatch
from engine.models.verdict import VerdictStore
from engine.models.weights import GgufWeights, Weights, open_weights
from engine.outputs import SamplingDefaults
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import open_tokenizer

NO_ADAPTERS = LoraConfig()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything that follows from the model's files.

    max_position: tokens one sequence may span. load_seconds: phase -> seconds."""

    backbone: Backbone
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    sampling_defaults: SamplingDefaults
    max_position: int
    name: str
    source: str
    architecture: str
    load_seconds: dict[str, float]


def load_model(
    config: ModelConfig,
    settings: DeviceConfig,
    *,
    backend: AttentionBackend,
    lora: LoraConfig = NO_ADAPTERS,
    device: Device = CPU,
    watch: Stopwatch | None = None,
) -> LoadedModel:
    """Load `config.model` and the adapters of `lora` onto `device`. The ISA level and the thread count are set before;
    `settings` are for the record. watch: takes the time of each phase.

    Raises StartError with one sentence for whatever is missing, unreadable or refused."""
    watch = watch or Stopwatch()
    with watch.phase("find"):
        source = resolve_source(config.model, load_format=config.load_format)
    with watch.phase("open"):
        weights = open_weights(source, cache_dir=config.cache_dir, load_format=config.load_format)
        dtype: torch.dtype = getattr(torch, choose_dtype(config.dtype, ops.isa(), device.torch_device.type))
    if device.is_cuda and config.quantization != "none":
        raise StartError(
            f"--quantization {config.quantization} is not served on a CUDA device: leave it out, or use --device cpu."
        )
    if device.is_cuda and lora.adapters:
        raise StartError("LoRA adapters are not served on a CUDA device: leave them out, or use --device cpu.")
    backbone, max_position = _load_backbone(config, weights, dtype, backend, watch, device, join=not lora.adapters)
    if lora.adapters:
        with watch.phase("adapters"):
            importlib.import_module("engine.models.lora").add_adapters(backbone, lora.adapters)
    with watch.phase("tokenizer"):
        tokenizer = open_tokenizer(
            source,
            hf_config=weights.hf_config,
            generation_config=weights.generation_config,
            gguf_metadata=weights.gguf.metadata if isinstance(weights, GgufWeights) else None,
            may_make_one=weights.is_dummy,
        )
    generation = weights.generation_config if config.generation_config == "auto" else {}
    return LoadedModel(
        backbone=backbone,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        sampling_defaults=sampling_defaults(generation),
        max_position=max_position,
        name=source.name,
        source=source.origin,
        architecture=weights.architecture,
        load_seconds=watch.seconds,
    )


def _check_room(num_bytes: int, device: Device, why: str = "") -> None:
    available = device.free_memory() if device.is_cuda else available_memory()
    if num_bytes > available:
        of = f"of {device.name}'s memory is free" if device.is_cuda else "of memory is available"
        raise StartError(
            f"The model's weights take {size_text(num_bytes)}{why}, but only {size_text(available)} {of}."
        )


def _load_backbone(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    backend: AttentionBackend,
    watch: Stopwatch,
    device: Device,
    *,
    join: bool,
) -> tuple[Backbone, int]:
    """(backbone, longest sequence in tokens). join: see swap_modules."""
    store = VerdictStore(config.cache_dir, weights.content_hash, dtype, backend.name, device)
    kept = store.load() if config.self_check == "auto" else None
    if kept is not None and kept.recipe is not None and kept.recipe.fits(weights.shapes):
        quantiser = Quantiser(config.quantization, weights, {})
        _check_room(served_bytes(kept.recipe, weights.shapes, quantiser, dtype), device)
        with watch.phase("weights"):
            tensors = _named(config, weights, dtype, device, watch)
        num_bytes = weights.num_parameters * dtype.itemsize
        backbone = from_recipe(
            kept, kept.recipe, weights, tensors, backend, config.quantization, watch, num_bytes, device.torch_device
        )
        return backbone, kept.max_position
    why = "" if config.quantization == "none" else " before they are quantised, as a model's first start reads them"
    _check_room(weights.num_parameters * dtype.itemsize, device, why)
    with watch.phase("modelling_code"):
        first = importlib.import_module("engine.models.first_load")
    backbone, found = first.first_load(config, weights, dtype, backend, kept, watch, device.torch_device, join)
    if kept is None and config.self_check != "never":
        store.save(found)
    _check_quantised(config, backbone)
    return backbone, found.max_position


def _named(
    config: ModelConfig, weights: Weights, dtype: torch.dtype, device: Device, watch: Stopwatch
) -> Mapping[str, Tensor]:
    """For the fused decoder, which asks for every tensor once, or for none of those that it quantises."""
    if config.quantization != "none":
        return weights.some_tensors(dtype)
    if device.is_cuda:
        return weights.streamed(dtype)
    return dict(watch.counted(weights.tensors(dtype), weights.num_parameters * dtype.itemsize))


def _check_quantised(config: ModelConfig, backbone: Backbone) -> None:
    """Raises StartError if weights were to be quantised and were not; "auto" asks for what can be had."""
    if config.quantization in ("none", "auto") or backbone.quantization != "none":
        return
    raise StartError(
        f"--quantization {config.quantization} needs the fused decoder, which does not serve this model"
        + (" without its self-check." if config.self_check == "never" else ".")
    )
