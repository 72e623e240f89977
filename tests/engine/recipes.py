"""Recipes of tiny decoders with random weights, one for every thing a recipe can say."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.config import Quantization
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.fused_recipe import (
    EMBEDDING,
    GLM_NORMS,
    HEAD,
    HEAD_BIAS,
    JOINED_GATE_UP,
    JOINED_QKV,
    PARALLEL_NORM,
    POST_NORMS,
    PRE_NORMS,
    SANDWICH_NORMS,
    SHARED_MLPS,
    UNGATED,
    UNGATED_CONVOLVED,
    ExpertsRecipe,
    FusedRecipe,
    LayerRecipe,
    NormPlaces,
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


def norms(places: NormPlaces, *heads: str, variant: NormVariant = "llama") -> dict[str, NormRecipe]:
    names = (*places.names(), *heads, "norm")
    return {name: NormRecipe(1e-6 * (1 + i), variant) for i, name in enumerate(names)}


def rotated_by(*ropes: int | None) -> tuple[LayerRecipe, ...]:
    return tuple(LayerRecipe(None, rope) for rope in ropes)


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
    norms=norms(PRE_NORMS),
    ropes=(rope(64),),
    layers=(LayerRecipe(None, 0),) * 3,
)
RECIPES: dict[str, FusedRecipe] = {
    "plain": PLAIN,
    "tied": replace(PLAIN, is_tied=True, num_kv_heads=6, norms=norms(PRE_NORMS, variant="f32")),
    "one_head": replace(PLAIN, num_query_heads=1, num_kv_heads=1, head_dim=16, ropes=(rope(16),)),
    "narrow_heads": replace(PLAIN, head_dim=6, ropes=(rope(6),), scale=0.4),
    "qk_norms": replace(PLAIN, norms=norms(PRE_NORMS, "q_norm", "k_norm"), activation="gelu"),
    "windows": replace(PLAIN, layers=(LayerRecipe(8, 0), LayerRecipe(None, 0), LayerRecipe(40, 0))),
    "everything": replace(
        PLAIN,
        softcap=20.0,
        activation="gelu_tanh",
        embedding_scale=7.745966692414834,
        is_tied=True,
        norms=norms(SANDWICH_NORMS, "q_norm", "k_norm", variant="gemma"),
        ropes=(rope(64), rope(64, 1e6, 1.25)),
        layers=(LayerRecipe(8, 0), LayerRecipe(None, 1), LayerRecipe(8, 0)),
        residual_scale=0.22,
        logits_scale=0.3,
        logits_softcap=4.0,
    ),
    "joined": replace(PLAIN, qkv=JOINED_QKV, mlp=JOINED_GATE_UP, norms=norms(GLM_NORMS)),
    "norms_behind": replace(PLAIN, norms=norms(POST_NORMS, "q_norm", "k_norm", variant="f32")),
    "partly_rotated": replace(PLAIN, ropes=(rope(24), rope(64)), layers=rotated_by(0, 1, 0)),
    "not_rotated": replace(PLAIN, ropes=(rope(10),), layers=rotated_by(0, None, None)),
    "never_rotated": replace(PLAIN, ropes=(), layers=rotated_by(None, None, None)),
    "scaled": replace(PLAIN, embedding_scale=12.3, residual_scale=0.22, logits_scale=1.5),
    "capped": replace(PLAIN, logits_softcap=3.0),
    "layer_norms": replace(PLAIN, norms=norms(PRE_NORMS, variant="layer"), mlp=UNGATED_CONVOLVED, activation="gelu"),
    "parallel": replace(PLAIN, norms=norms(PARALLEL_NORM, variant="layer"), logits_scale=0.5),
    "parallel_halves": replace(PLAIN, norms=norms(PRE_NORMS, variant="layer"), mlp=UNGATED, has_parallel_halves=True),
    "by_head": replace(PLAIN, num_kv_heads=6, qkv=JOINED_QKV, qkv_by_head=True, ropes=(rope(16),)),
    "neighbours": replace(
        PLAIN,
        norms=norms(PRE_NORMS, "q_norm", "k_norm"),
        ropes=(replace(rope(24), is_interleaved=True), rope(64)),
        layers=rotated_by(0, 1, None),
    ),
}
# of which norms span all heads together
WIDE_NORMS = frozenset({"norms_behind"})
EXPERTS = replace(PLAIN, experts=ExpertsRecipe(8, 2, True))
MIXTURES = {
    "experts": EXPERTS,
    "gated_shared": replace(
        PLAIN, experts=ExpertsRecipe(8, 2, False, shared=SHARED_MLPS[0], has_shared_gate=True), activation="gelu"
    ),
    "corrected": replace(
        PLAIN,
        experts=ExpertsRecipe(8, 3, True, "sigmoid", 2.5, has_correction=True, shared=SHARED_MLPS[1], is_exact=True),
        layers=(LayerRecipe(None, 0, is_dense=True), LayerRecipe(None, 0), LayerRecipe(None, 0)),
    ),
}


def draw_tensors(
    recipe: FusedRecipe,
    dtype: torch.dtype,
    *,
    hidden: int = 60,
    intermediate: int = 100,
    biases: bool = False,
    wide_norms: bool = False,
) -> dict[str, Tensor]:
    """Random weights of a recipe by transformers' names. wide_norms: those of heads span all of them."""
    generator = torch.Generator().manual_seed(5)
    query, kv = recipe.num_query_heads * recipe.head_dim, recipe.num_kv_heads * recipe.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj": (query, hidden),
        "k_proj": (kv, hidden),
        "v_proj": (kv, hidden),
        "qkv_proj": (query + 2 * kv, hidden),
        "o_proj": (hidden, query),
        "q_norm": (query if wide_norms else recipe.head_dim,),
        "k_norm": (kv if wide_norms else recipe.head_dim,),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "gate_up_proj": (2 * intermediate, hidden),
        "down_proj": (hidden, intermediate),
        "c_fc": (intermediate, hidden),
        "c_proj": (hidden, intermediate),
        "gate": (0 if recipe.experts is None else recipe.experts.count, hidden),
        "shared_expert_gate": (1, hidden),
        "e_score_correction_bias": (0 if recipe.experts is None else recipe.experts.count,),
    }
    tensors = {}
    for name in recipe.tensor_names():
        module = name.removesuffix(".weight")
        last = module.rpartition(".")[2]
        tensors[name] = (recipe.vocab_size, hidden) if name in (EMBEDDING, HEAD) else shapes.get(last, (hidden,))
        if biases and name in (EMBEDDING, HEAD):
            tensors[HEAD_BIAS] = (recipe.vocab_size,)
        if biases and last.endswith(("_proj", "_fc")):
            tensors[f"{module}.bias"] = shapes[last][:1]
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
