"""From a recipe and a model's numbers to a backbone: the fused decoder, its linear layers quantised if that is wanted.

Imports no transformers: this is how later starts load.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.config import Quantization
from engine.device import HOST
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.fused_recipe import FusedRecipe
from engine.models.quantiser import Quantiser
from engine.models.stopwatch import Stopwatch
from engine.models.tensor_names import NamedTensors
from engine.models.verdict import Kept
from engine.models.weights import Weights


def from_recipe(
    kept: Kept,
    recipe: FusedRecipe,
    weights: Weights,
    tensors: Mapping[str, Tensor],
    backend: AttentionBackend,
    quantization: Quantization,
    watch: Stopwatch,
    num_bytes: int,
    device: torch.device = HOST,
) -> Backbone:
    """weights: where quantised tensors come from; tensors: all others, by transformers' names.
    num_bytes: of all of them. Raises StartError."""
    with watch.phase("pack"):
        if quantization == "none":  # else many come from elsewhere
            tensors = watch.looked_up(tensors, num_bytes)
        quantiser = None if quantization == "none" else Quantiser(quantization, weights, NamedTensors(tensors))
        model = FusedModel(recipe, tensors, backend, kept.max_position, quantiser, device=device)
    return Backbone(model, batch_invariant=kept.verdict.batch_invariant, num_parameters=weights.num_parameters)
