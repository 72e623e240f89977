"""The load that knows nothing yet: through transformers' modelling code, with the self-check.

Imported only when it is needed, because the modelling code takes longer to import than everything else takes.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from engine.attention.base import AttentionBackend
from engine.config import ModelConfig, StartError
from engine.models import self_check
from engine.models.allow import check_config, load_config, max_exact_position, model_class
from engine.models.attention_hook import IMPLEMENTATION, register
from engine.models.backbone import Backbone
from engine.models.build import assign_weights, build_tree, fill_dummy
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
) -> tuple[Backbone, Kept]:
    """(backbone, what to keep for later starts). kept: what an earlier start found, None: check now, unless
    config.self_check is "never". Raises StartError."""
    with watch.phase("modelling_code"):
        hf_config = load_config(weights.hf_config)
        check_config(hf_config, model_class(hf_config))
        register()
    max_position = max_exact_position(hf_config)
    with watch.phase("build"):
        tree = build_tree(hf_config, dtype, IMPLEMENTATION)
    with watch.phase("weights"):
        if weights.is_dummy:
            fill_dummy(tree, config.seed)
        else:
            assign_weights(tree, weights.tensors(dtype), dtype)
    if kept is None and config.self_check != "never":
        return _checked(tree, hf_config, backend, max_position, watch)
    fuse = kept is not None and kept.recipe is not None
    with watch.phase("pack"):
        backbone = prepare(tree, backend, max_position, fuse=fuse)
    if kept is not None:
        backbone.batch_invariant &= kept.verdict.batch_invariant
    _log_claim(backbone, backend)
    return backbone, kept or Kept(Verdict(0.0, 0.0, backbone.batch_invariant), max_position, None)


def _checked(
    tree: Any, hf_config: Any, backend: AttentionBackend, max_position: int, watch: Stopwatch
) -> tuple[Backbone, Kept]:
    with watch.phase("self_check"):
        fuse, verdict = _small(hf_config, tree, backend)
        expected = self_check.plain_logits(tree)
        recipe = recipe_of(tree) if fuse else None
    with watch.phase("pack"):
        backbone = prepare(tree, backend, max_position, fuse=fuse)
    verdict = replace(verdict, batch_invariant=verdict.batch_invariant and backbone.batch_invariant)
    backbone.batch_invariant = verdict.batch_invariant
    with watch.phase("self_check"):
        self_check.check_real(backbone, expected)
    _log_claim(backbone, backend)
    return backbone, Kept(verdict, max_position, recipe)


def _small(hf_config: Any, tree: Any, backend: AttentionBackend) -> tuple[bool, Verdict]:
    """(whether to fuse, verdict): the fused decoder if the model has a recipe and it passes."""
    try:
        recipe_of(tree)
        return True, self_check.check_in_small(hf_config, backend, fuse=True)
    except NoRecipe as reason:
        logger.info("%s", reason)
    except StartError as reason:
        logger.info("Not fused: %s", reason)
    return False, self_check.check_in_small(hf_config, backend, fuse=False)


def _log_claim(backbone: Backbone, backend: AttentionBackend) -> None:
    if not backbone.batch_invariant and backend.name in BACKENDS_WITH_CLAIM:
        logger.warning("Outputs may depend on neighbouring requests: not all of this model runs in our own ops.")
