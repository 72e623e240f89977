"""The load that knows nothing yet: through transformers' modelling code, with the self-check.

Imported only when it is needed, because the modelling code takes longer to import than everything else takes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.attention.native import NativeAttention
from engine.config import ModelConfig, StartError
from engine.device import HOST
from engine.models import self_check
from engine.models.allow import check_config, load_config, max_exact_position, model_class
from engine.models.attention_hook import IMPLEMENTATION, register
from engine.models.backbone import Backbone
from engine.models.build import DummyTensors, assign_weights, build_tree, fill_dummy, tensors_of
from engine.models.from_recipe import from_recipe
from engine.models.fused_recipe import FusedRecipe
from engine.models.prepare import BACKENDS_WITH_CLAIM, NoRecipe, prepare, recipe_of
from engine.models.stopwatch import Stopwatch
from engine.models.verdict import Kept, Verdict
from engine.models.weights import Weights

logger = logging.getLogger("pagemill.engine")


def first_load(
    config: ModelConfig,
    weights: Weights,
    dtype: torch.dtype,
    backend: AttentionBackend,
    kept: Kept | None,
    watch: Stopwatch,
    device: torch.device = HOST,
    join: bool = True,
) -> tuple[Backbone, Kept]:
    """(backbone, what to keep for later starts). kept: what an earlier start found, None: check now, unless
    config.self_check is "never". The tree, and transformers' part in the check, stay on the CPU; what serves is made
    on `device`, one weight after the other. join: see swap_modules. Raises StartError."""
    with watch.phase("modelling_code"):
        hf_config = load_config(weights.hf_config)
        check_config(hf_config, model_class(hf_config))
        register()
    max_position = max_exact_position(hf_config)
    with watch.phase("build"):
        tree = build_tree(hf_config, dtype, IMPLEMENTATION)
    with watch.phase("weights"):
        if weights.is_dummy:
            fill_dummy(tree, config.seed, shared=device != HOST)
        else:
            read = watch.counted(weights.tensors(dtype), weights.num_parameters * dtype.itemsize)
            assign_weights(tree, read, dtype)
    if kept is None and config.self_check != "never":
        backbone, kept = _checked(
            tree, hf_config, backend, max_position, watch, device, _tensors(tree, weights, device), join
        )
    else:
        fuse = kept is not None and kept.recipe is not None
        with watch.phase("pack"):
            tensors = _tensors(tree, weights, device)
            backbone = prepare(tree, backend, max_position, fuse=fuse, device=device, tensors=tensors, join=join)
        kept = kept or Kept(Verdict(0.0, 0.0, backbone.batch_invariant), max_position, None)
        backbone.batch_invariant &= kept.verdict.batch_invariant
        _log_claim(backbone, backend)
    if config.quantization != "none" and kept.recipe is not None:
        # only now: the check compares with transformers in full precision
        del backbone
        tensors = tensors_of(tree)
        num_bytes = weights.num_parameters * dtype.itemsize
        backbone = from_recipe(kept, kept.recipe, weights, tensors, backend, config.quantization, watch, num_bytes)
    return backbone, kept


def _tensors(tree: Any, weights: Weights, device: torch.device) -> Mapping[str, Tensor] | None:
    """The tree's numbers for the fused decoder; None: its parameters as they are."""
    return DummyTensors(tree, device) if weights.is_dummy and device != HOST else None


def _checked(
    tree: Any,
    hf_config: Any,
    backend: AttentionBackend,
    max_position: int,
    watch: Stopwatch,
    device: torch.device,
    tensors: Mapping[str, Tensor] | None,
    join: bool,
) -> tuple[Backbone, Kept]:
    """The fused decoder if this model has a recipe and passes both halves of the check with it, else the tree."""
    with watch.phase("self_check"):
        expected = self_check.plain_logits(tree)
    try:
        with watch.phase("self_check"):
            recipe = recipe_of(tree)
        return _passing(tree, hf_config, backend, max_position, expected, recipe, watch, device, tensors, join)
    except NoRecipe as reason:
        logger.info("%s", reason)
    except StartError as reason:
        logger.info("Not fused: %s", reason)
    return _passing(tree, hf_config, backend, max_position, expected, None, watch, device, tensors, join)


def _passing(
    tree: Any,
    hf_config: Any,
    backend: AttentionBackend,
    max_position: int,
    expected: Tensor,
    recipe: FusedRecipe | None,
    watch: Stopwatch,
    device: torch.device,
    tensors: Mapping[str, Tensor] | None,
    join: bool,
) -> tuple[Backbone, Kept]:
    """One way through both halves. expected: transformers' logits on the real weights. Raises StartError."""
    fuse, is_host = recipe is not None, device == HOST
    with watch.phase("self_check"):
        in_small = backend if is_host else NativeAttention()
        verdict = self_check.check_in_small(hf_config, in_small, fuse=fuse, stepwise=not is_host)
    with watch.phase("pack"):
        backbone = prepare(tree, backend, max_position, fuse=fuse, device=device, tensors=tensors, join=join)
    verdict = replace(verdict, batch_invariant=verdict.batch_invariant and backbone.batch_invariant)
    backbone.batch_invariant = verdict.batch_invariant
    with watch.phase("self_check"):
        self_check.check_real(backbone, expected)
        if backbone.batch_invariant and not is_host:  # there the check in small has not seen the kernels
            backbone.batch_invariant = self_check.keeps_bits(backbone)
            verdict = replace(verdict, batch_invariant=backbone.batch_invariant)
    _log_claim(backbone, backend)
    return backbone, Kept(verdict, max_position, recipe)


def _log_claim(backbone: Backbone, backend: AttentionBackend) -> None:
    if not backbone.batch_invariant and backend.name in BACKENDS_WITH_CLAIM:
        logger.warning("Outputs may depend on neighbouring requests: not all of this model runs in our own ops.")
