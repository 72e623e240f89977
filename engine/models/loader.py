"""From a `ModelConfig` to a loaded model: source, weights, tree, allow rule, swap, self-check, tokenizer.

The order is chosen so that whatever will be refused is refused before it costs much. Knows nothing of the KV pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engine import ops
from engine.attention.base import AttentionBackend
from engine.config import DeviceConfig, ModelConfig
from engine.models import self_check
from engine.models.allow import check_config, load_config, max_exact_position, model_class
from engine.models.attention_hook import IMPLEMENTATION, register
from engine.models.backbone import Backbone
from engine.models.build import assign_weights, build_tree, fill_dummy
from engine.models.config_facts import choose_dtype, sampling_defaults
from engine.models.self_check import Verdict, VerdictStore
from engine.models.source import resolve_source
from engine.models.swap import SwapReport, swap_modules
from engine.models.weights import GgufWeights, Weights, open_weights
from engine.outputs import SamplingDefaults
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import open_tokenizer

logger = logging.getLogger("pagemill.engine")

BACKENDS_WITH_CLAIM = frozenset({"native"})  # whose attention keeps a row's bits whatever stands beside it


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


@dataclass(slots=True)
class _Stopwatch:
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def load_model(config: ModelConfig, device: DeviceConfig, *, backend: AttentionBackend) -> LoadedModel:
    """Load `config.model`. The ISA level and the thread count are set before; `device` is for the record.

    Raises StartError with one sentence for whatever is missing, unreadable or refused."""
    watch = _Stopwatch()
    with watch.phase("open"):
        source = resolve_source(config.model, load_format=config.load_format)
        weights = open_weights(source, cache_dir=config.cache_dir, load_format=config.load_format)
        dtype: torch.dtype = getattr(torch, choose_dtype(config.dtype, ops.isa()))
    with watch.phase("modelling_code"):
        hf_config = load_config(weights.hf_config)
        check_config(hf_config, model_class(hf_config))
        register()
    max_position = max_exact_position(hf_config)
    backbone = _load_backbone(config, weights, hf_config, dtype, max_position, backend, watch)
    with watch.phase("tokenizer"):
        tokenizer = open_tokenizer(
            source,
            hf_config=weights.hf_config,
            generation_config=weights.generation_config,
            gguf_metadata=weights.gguf.metadata if isinstance(weights, GgufWeights) else None,
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


def _load_backbone(
    config: ModelConfig,
    weights: Weights,
    hf_config: Any,
    dtype: torch.dtype,
    max_position: int,
    backend: AttentionBackend,
    watch: _Stopwatch,
) -> Backbone:
    with watch.phase("build"):
        tree = build_tree(hf_config, dtype, IMPLEMENTATION)
    with watch.phase("weights"):
        if weights.is_dummy:
            fill_dummy(tree, config.seed)
        else:
            assign_weights(tree, weights.tensors(dtype), dtype)
    num_parameters = sum(parameter.numel() for parameter in tree.parameters())
    store = VerdictStore(config.cache_dir, weights.content_hash, dtype, backend.name)
    verdict = store.load() if config.self_check == "auto" else None
    must_check = verdict is None and config.self_check != "never"
    expected: Tensor | None = None
    if must_check:
        with watch.phase("self_check"):
            verdict = self_check.check_in_small(hf_config, backend)
            expected = self_check.plain_logits(tree)
    with watch.phase("pack"):
        report = swap_modules(tree, dtype, max_position)
    invariant = report.batch_invariant and backend.name in BACKENDS_WITH_CLAIM
    invariant = invariant and (verdict is None or verdict.batch_invariant)
    _log_claim(report, verdict)
    backbone = Backbone(tree, backend, batch_invariant=invariant, num_parameters=num_parameters)
    if expected is not None and verdict is not None:
        with watch.phase("self_check"):
            self_check.check_real(backbone, expected)
            store.save(verdict)
    return backbone


def _log_claim(report: SwapReport, verdict: Verdict | None) -> None:
    if report.left:
        logger.warning(
            "Outputs may depend on neighbouring requests: %d modules compute with torch's own operations, such as %s",
            len(report.left),
            report.left[0],
        )
    elif verdict is not None and not verdict.batch_invariant:
        logger.warning("Outputs may depend on neighbouring requests: the self-check saw bits change beside others")
