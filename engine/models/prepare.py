"""From a transformers tree with its weights to a backbone: fused if its recipe fits, else swapped module by module."""

from __future__ import annotations

import logging
from typing import Any

from engine.attention.base import AttentionBackend
from engine.config import StartError
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.fused_recipe import FusedRecipe
from engine.models.recipe import derive_recipe
from engine.models.swap import swap_modules
from engine.models.tree import TreeModel, record_calls, resolve_specs

logger = logging.getLogger("pagemill.engine")

BACKENDS_WITH_CLAIM = frozenset({"native"})  # whose attention keeps a row's bits whatever stands beside it


class NoRecipe(StartError):
    """The tree is none that the fused decoder serves."""


def recipe_of(tree: Any) -> FusedRecipe:
    """Raises NoRecipe; StartError if the tree cannot be served at all."""
    recorded = record_calls(tree)
    recipe = derive_recipe(tree, recorded, resolve_specs(tree.config, recorded))
    if recipe is None:
        raise NoRecipe(f"Model type {tree.config.model_type!r} is no decoder that has a fused path.")
    return recipe


def prepare(tree: Any, backend: AttentionBackend, max_positions: int, *, fuse: bool) -> Backbone:
    """Packs the tree's weights. Unfused, the tree itself becomes the model; fused, it is left as it was.

    Raises NoRecipe or StartError."""
    has_claim = backend.name in BACKENDS_WITH_CLAIM
    num_parameters = sum(parameter.numel() for parameter in tree.parameters())
    if fuse:
        model = FusedModel(recipe_of(tree), dict(tree.named_parameters()), backend, max_positions)
        return Backbone(model, batch_invariant=has_claim, num_parameters=num_parameters)
    dtype = tree.get_input_embeddings().weight.dtype
    report = swap_modules(tree, dtype, max_positions)
    if report.left:
        logger.info("%d modules compute with torch's own operations, such as %s", len(report.left), report.left[0])
    return Backbone(
        TreeModel(tree, backend),
        batch_invariant=has_claim and report.batch_invariant,
        num_parameters=num_parameters,
    )
