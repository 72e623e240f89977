"""Recipes of tiny decoders with random weights, one for every thing a recipe can say."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.config import Quantization
from engine.models.backbone import Backbone
from engine.models.fused import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_NORMS,
    PRE_NORMS,
    FusedModel,
    FusedRecipe,
    LayerRecipe,
    NormRecipe,
    RopeRecipe,
)
from engine.models.quantised import QuantFormat, QuantisedWeight
from engine.models.quantiser import Quantiser
from engine.ops import NormVariant

VOCAB_SIZE = 97
MAX_POSITIONS = 512


class Stepwise(NativeAttention):
    """The same attention under a name for which the decoder goes op by op."""

    name = "stepwise"


def rope(head_dim: int, base: float = 10000.0, scaling: float = 1.0) -> RopeRecipe:
    return RopeRecipe(tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2)), scaling)


def norms(*names: str, variant: NormVariant = "llama") -> dict[str, NormRecipe]:
    return {name: NormRecipe(1e-6 * (1 + i), variant) for i, name in enumerate((*names, "norm"))}


PLAIN = FusedRecipe(
    vocab_size=VOCAB_SIZE,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=64,
    scale=0.125,
    softcap=None,
    activation="silu",
    embedding_scale=None,
    is_tied=False,
    norms=norms(*PRE_NORMS),
    ropes=(rope(64),),
    layers=(LayerRecipe(None, 0),) * 3,
)
RECIPES: dict[str, FusedRecipe] = {
    "plain": PLAIN,
    "tied": replace(PLAIN, is_tied=True, num_kv_heads=6, norms=norms(*PRE_NORMS, variant="f32")),
    "one_head": replace(PLAIN, num_query_heads=1, num_kv_heads=1, head_dim=16, ropes=(rope(16),)),
    "narrow_heads": replace(PLAIN, head_dim=6, ropes=(rope(6),), scale=0.4),
    "qk_norms": replace(PLAIN, norms=norms(*PRE_NORMS, "q_norm", "k_norm"), activation="gelu"),
    "windows": replace(PLAIN, layers=(LayerRecipe(8, 0), LayerRecipe(None, 0), LayerRecipe(40, 0))),
    "everything": replace(
        PLAIN,
        softcap=20.0,
        activation="gelu_tanh",
        embedding_scale=7.745966692414834,
        is_tied=True,
        norms=norms(*LAYER_NORMS, "q_norm", "k_norm", variant="gemma"),
        ropes=(rope(64), rope(64, 1e6, 1.25)),
        layers=(LayerRecipe(8, 0), LayerRecipe(None, 1), LayerRecipe(8, 0)),
    ),
}


def draw_tensors(
    recipe: FusedRecipe, dtype: torch.dtype, *, hidden: int = 60, intermediate: int = 100, biases: bool = False
) -> dict[str, Tensor]:
    """Random weights of a recipe by transformers' names."""
    generator = torch.Generator().manual_seed(5)
    query, kv = recipe.num_query_heads * recipe.head_dim, recipe.num_kv_heads * recipe.head_dim
    shapes = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }
    tensors = {EMBEDDING: (recipe.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not recipe.is_tied:
        tensors[HEAD] = (recipe.vocab_size, hidden)
    for index in range(len(recipe.layers)):
        prefix = f"model.layers.{index}."
        tensors |= {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}
        if biases:
            tensors |= {f"{prefix}{name}.bias": shape[:1] for name, shape in shapes.items()}
        for name in recipe.norms:
            if name in LAYER_NORMS:
                tensors[f"{prefix}{name}.weight"] = (hidden,)
            elif name != "norm":
                tensors[f"{prefix}self_attn.{name}.weight"] = (recipe.head_dim,)
    return {
        name: torch.randn(shape, generator=generator).mul_(1.5 / shape[-1] ** 0.5 if len(shape) > 1 else 0.5).to(dtype)
        for name, shape in tensors.items()
    }


class NothingStored:
    """Files without quantised weights."""

    def quantised(self, name: str) -> QuantisedWeight | None:
        return None

    def quantised_format(self, name: str) -> QuantFormat | None:
        return None


def backbones(
    recipe: FusedRecipe, tensors: dict[str, Tensor], quantization: Quantization = "none"
) -> tuple[Backbone, Backbone]:
    """(in one native call, op by op)"""
    quantiser = Quantiser(quantization, NothingStored(), tensors)
    models = [
        FusedModel(recipe, tensors, backend, MAX_POSITIONS, quantiser) for backend in (NativeAttention(), Stepwise())
    ]
    native, stepwise = (Backbone(model, batch_invariant=True, num_parameters=0) for model in models)
    return native, stepwise
