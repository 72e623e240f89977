"""From a transformers tree with its weights to a backbone: fused if its recipe fits, else swapped module by module."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, PagedLayer
from engine.config import StartError
from engine.device import HOST
from engine.models.backbone import Backbone
from engine.models.build import tensors_of
from engine.models.fused import FusedModel
from engine.models.fused_recipe import FusedRecipe
from engine.models.recipe import derive_recipe
from engine.models.swap import swap_modules
from engine.models.tree import TreeModel, record_calls, resolve_specs

logger = logging.getLogger("pagemill.engine")

BACKENDS_WITH_CLAIM = frozenset({"native"})  # whose attention keeps a row's bits whatever stands beside it
MAX_DEVICE_DIM = 256  # of a head, on CUDA


class NoRecipe(StartError):
    """The tree is none that the fused decoder serves."""


def recipe_of(tree: Any) -> FusedRecipe:
    """Raises NoRecipe; StartError if the tree cannot be served at all."""
    recorded = record_calls(tree)
    recipe = derive_recipe(tree, recorded, resolve_specs(tree.config, recorded))
    if recipe is None:
        raise NoRecipe(f"Model type {tree.config.model_type!r} is no decoder that has a fused path.")
    return recipe


def check_heads(layers: Sequence[PagedLayer], device: torch.device) -> None:
    """Raises StartError for what the device's attention does not serve."""
    for layer in layers:
        for dim in (layer.spec.key_dim, layer.spec.value_dim):
            if device != HOST and (dim % 8 or dim > MAX_DEVICE_DIM):
                raise StartError(
                    f"Attention heads of {dim} numbers are not served on a CUDA device, whose kernels want a multiple "
                    f"of 8 up to {MAX_DEVICE_DIM}; use --device cpu."
                )


def prepare(
    tree: Any,
    backend: AttentionBackend,
    max_positions: int,
    *,
    fuse: bool,
    device: torch.device = HOST,
    stepwise: bool = False,
    tensors: Mapping[str, Tensor] | None = None,
    join: bool = True,
) -> Backbone:
    """Packs the weights of a tree on the CPU, for `device`. Unfused, the tree itself becomes the model; fused, it is
    left as it was, and `tensors` are its numbers (None: its own). stepwise: see FusedModel.
    join: see swap_modules.

    Raises NoRecipe or StartError."""
    has_claim = backend.name in BACKENDS_WITH_CLAIM
    num_parameters = sum(parameter.numel() for parameter in tree.parameters())
    if fuse:
        tensors = tensors_of(tree) if tensors is None else tensors
        model = FusedModel(recipe_of(tree), tensors, backend, max_positions, device=device, stepwise=stepwise)
        check_heads(model.layers, device)
        return Backbone(model, batch_invariant=has_claim, num_parameters=num_parameters)
    dtype = tree.get_input_embeddings().weight.dtype
    report = swap_modules(tree, dtype, max_positions, device, join=join)
    if report.left:
        logger.info("%d modules compute with torch's own operations, such as %s", len(report.left), report.left[0])
    unfused = TreeModel(tree, backend)
    check_heads(unfused.layers, device)
    return Backbone(
        unfused,
        batch_invariant=has_claim and report.batch_invariant,
        num_parameters=num_parameters,
    )
