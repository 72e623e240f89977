"""Derives a `FusedRecipe` from a transformers tree: by parameter names, then by what its modules compute.

Only proposes. A tree may do things between its modules that no module shows (residual multipliers, another order of
norms); the self-check compares the proposal with the tree before anyone believes it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.attention.base import LayerSpec
from engine.models.attention_hook import RecordedCall
from engine.models.fused import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    LAYER_NORMS,
    LINEARS,
    PRE_NORMS,
    FusedRecipe,
    LayerRecipe,
    NormRecipe,
    RopeRecipe,
)
from engine.models.recognise import gated_candidates, gated_reading, norm_eps, norm_variant
from engine.ops import ActivationKind

QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


@torch.inference_mode()
def derive_recipe(tree: Any, recorded: list[RecordedCall], specs: list[LayerSpec]) -> FusedRecipe | None:
    """A recipe that may fit an unswapped tree; None if its structure already says no."""
    names = dict(tree.named_parameters())
    is_tied = HEAD not in names
    norm_names = _norm_names(names, len(specs), is_tied)
    if norm_names is None or any(True for spec in specs if spec.chunk or spec.has_sinks):
        return None
    first = specs[0]
    uniform = all(_shape(spec) == _shape(first) for spec in specs) and first.key_dim == first.value_dim
    if not uniform or len({call.scale for call in recorded}) != 1:
        return None
    norms = _norms(tree, norm_names)
    activation = _activation(tree.model.layers[0].mlp)
    ropes = _ropes(tree, first.key_dim)
    scale = _embedding_scale(tree)
    if norms is None or activation is None or ropes is None or scale is None:
        return None
    keys = list(ropes)
    kinds = list(getattr(tree.config, "layer_types", None) or ()) if len(keys) > 1 else keys * len(specs)
    if len(kinds) != len(specs) or any(kind not in ropes for kind in kinds):
        return None
    return FusedRecipe(
        vocab_size=int(tree.config.vocab_size),
        num_query_heads=first.num_query_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_dim,
        scale=recorded[0].scale,
        softcap=first.softcap,
        activation=activation,
        embedding_scale=None if scale == 1.0 else scale,
        is_tied=is_tied,
        norms=norms,
        ropes=tuple(ropes.values()),
        layers=tuple(LayerRecipe(spec.window, keys.index(kind)) for spec, kind in zip(specs, kinds, strict=True)),
    )


def _shape(spec: LayerSpec) -> tuple[object, ...]:
    return spec.num_query_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.softcap


def _norm_names(names: dict[str, Any], num_layers: int, is_tied: bool) -> tuple[str, ...] | None:
    """The norms of one layer, if the tree has exactly the parameters of a recipe with them; biases are optional."""
    present = {name for name in names if not name.endswith(".bias")}
    biases = {name.removesuffix(".bias") for name in names if name.endswith(".bias")}
    for norms in (PRE_NORMS, LAYER_NORMS):
        for extra in ((), QK_NORMS):
            parts = (*norms, *extra, *LINEARS)
            wanted = {f"model.layers.{index}.{part}.weight" for index in range(num_layers) for part in parts}
            wanted |= {EMBEDDING, FINAL_NORM} | (set() if is_tied else {HEAD})
            if present == wanted:
                return (*norms, *extra) if _biases_fit(biases, num_layers) else None
    return None


def _biases_fit(biases: set[str], num_layers: int) -> bool:
    """Linear layers only, the same in every layer, and all or none of those that become one product."""
    suffixes = {name.split(".", 3)[3] for name in biases if name.startswith("model.layers.")}
    if any(not name.startswith("model.layers.") for name in biases) or not suffixes <= set(LINEARS):
        return False
    whole = len(biases) == len(suffixes) * num_layers
    return whole and all(len(suffixes & set(group)) in (0, len(group)) for group in (LINEARS[:3], LINEARS[4:6]))


def _norms(tree: Any, names: tuple[str, ...]) -> dict[str, NormRecipe] | None:
    modules = {name.rpartition(".")[2]: tree.get_submodule(f"model.layers.0.{name}") for name in names}
    modules["norm"] = tree.model.norm
    norms = {}
    for name, module in modules.items():
        eps = norm_eps(module)
        variant = None if eps is None else norm_variant(module, eps)
        if eps is None or variant is None:
            return None
        norms[name] = NormRecipe(eps, variant)
    return norms


def _activation(mlp: nn.Module) -> ActivationKind | None:
    """gate_proj must be the gate: the recipe goes by names there, and arithmetic has the last word."""
    candidates = gated_candidates(mlp)
    reading = gated_reading(mlp, candidates) if candidates else None
    if reading is None:
        return None
    gate: Any = mlp.get_submodule("gate_proj")
    same = candidates[reading.candidate][0].weight.data_ptr() == gate.weight.data_ptr()
    return reading.kind if same else None


def _ropes(tree: Any, head_dim: int) -> dict[str, RopeRecipe] | None:
    """By layer type, "" where one serves all; None unless frequencies are fixed and cover the whole head."""
    module = getattr(tree.model, "rotary_emb", None)
    kinds = getattr(module, "rope_type", None)
    if module is None or kinds is None:
        return None
    ropes = {}
    for key in kinds if isinstance(kinds, dict) else ("",):
        prefix = f"{key}_" if key else ""
        inv_freq = getattr(module, f"{prefix}inv_freq", None)
        if not isinstance(inv_freq, torch.Tensor) or inv_freq.numel() * 2 != head_dim:
            return None
        scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
        ropes[key] = RopeRecipe(tuple(inv_freq.float().tolist()), scaling)
    return ropes


def _embedding_scale(tree: Any) -> float | None:
    """What the embedding module multiplies its rows by; None if it does something else."""
    module = tree.get_input_embeddings()
    ids = torch.arange(min(8, module.weight.shape[0]))
    rows, answer = module.weight[ids], module(ids)
    if torch.equal(rows, answer):
        return 1.0
    scale = getattr(module, "scalar_embed_scale", None)
    if not isinstance(scale, float):
        return None
    return scale if torch.equal(rows * torch.tensor(scale).to(rows.dtype), answer) else None
