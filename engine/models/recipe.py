"""Derives a `FusedRecipe` from a transformers tree: by parameter names, then by what its modules compute.

Only proposes. A tree may do things between its modules that no module shows (another order of norms, scales without a
name in config.json); the self-check compares the proposal with the tree before anyone believes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from engine.attention.base import LayerSpec
from engine.models.attention_hook import RecordedCall
from engine.models.build import tensors_of
from engine.models.fused_recipe import (
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    JOINED_EXPERTS,
    PRE_NORMS,
    ROUTER,
    SHARED_GATE,
    SPLIT_GATE_UP,
    ExpertsRecipe,
    FusedRecipe,
    MlpNames,
    NormRecipe,
)
from engine.models.recipe_names import Parts, layer_parts
from engine.models.recipe_ropes import ropes_of, rotated
from engine.models.recognise import (
    gated_candidates,
    gated_reading,
    linear_parts,
    norm_eps,
    norm_variant,
    ungated_kind,
)
from engine.models.recognise_experts import MixtureTensors, experts_reading
from engine.models.tree import record_calls
from engine.ops import ActivationKind


@torch.inference_mode()
def derive_recipe(tree: Any, recorded: list[RecordedCall], specs: list[LayerSpec]) -> FusedRecipe | None:
    """A recipe that may fit an unswapped tree; None if its structure already says no."""
    names = tensors_of(tree)
    is_tied = HEAD not in names
    parts = layer_parts(names, len(specs), is_tied)
    if parts is None or any(True for spec in specs if spec.chunk or spec.has_sinks):
        return None
    first = specs[0]
    by_head = parts.dialect.by_head and first.num_query_heads != first.num_kv_heads
    uniform = not by_head and all(_shape(spec) == _shape(first) for spec in specs) and first.key_dim == first.value_dim
    if not uniform or len({call.scale for call in recorded}) != 1:
        return None
    norms = _norms(tree, parts)
    mlp = _mlp(tree, parts, names)
    ropes = ropes_of(tree, first.key_dim)
    scale = _embedding_scale(tree, parts)
    turned = None if ropes is None else rotated(tree, recorded, specs, ropes)
    if norms is None or mlp is None or scale is None or turned is None:
        return None
    divisor = _number(tree.config, "logits_scaling")
    return FusedRecipe(
        vocab_size=int(tree.config.vocab_size),
        num_query_heads=first.num_query_heads,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.key_dim,
        scale=recorded[0].scale,
        softcap=first.softcap,
        activation=mlp[0],
        embedding_scale=None if scale == 1.0 else scale,
        is_tied=is_tied,
        norms=norms,
        ropes=turned[0],
        layers=tuple(replace(layer, is_dense=dense) for layer, dense in zip(turned[1], parts.is_dense, strict=True)),
        residual_scale=_number(tree.config, "residual_multiplier"),
        logits_scale=_number(tree.config, "logit_scale") if divisor is None else 1 / divisor,
        logits_softcap=_number(tree.config, "final_logit_softcapping"),
        qkv=parts.qkv,
        mlp=parts.mlp or SPLIT_GATE_UP,
        experts=mlp[1],
        qkv_by_head=parts.dialect.by_head,
        has_parallel_halves=_has_parallel_halves(tree, parts),
    )


def _shape(spec: LayerSpec) -> tuple[object, ...]:
    return spec.num_query_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.softcap


def _number(config: Any, name: str) -> float | None:
    """A positive number other than one that config.json names, None if there is none."""
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or value == 1:
        return None
    return float(value)


def _module(tree: Any, parts: Parts, layer: int, name: str) -> Any:
    return tree.get_submodule(parts.dialect.module(f"model.layers.{layer}.{name}"))


def _norms(tree: Any, parts: Parts) -> dict[str, NormRecipe] | None:
    modules = {name.rpartition(".")[2]: _module(tree, parts, 0, name) for name in parts.norms}
    modules["norm"] = tree.get_submodule(parts.dialect.module(FINAL_NORM.removesuffix(".weight")))
    norms = {}
    for name, module in modules.items():
        eps = norm_eps(module)
        variant = None if eps is None else norm_variant(module, eps)
        if eps is None or variant is None:
            return None
        norms[name] = NormRecipe(eps, variant)
    return norms


def _mlp(tree: Any, parts: Parts, names: Mapping[str, Tensor]) -> tuple[ActivationKind, ExpertsRecipe | None] | None:
    """What the first MLP and the first mixture compute; None if they have not one activation."""
    kind = None
    if parts.mlp is not None:
        first = parts.is_dense.index(True) if parts.mixture is not None else 0
        kind = _activation(tree, parts, first, parts.mlp)
    if parts.mixture is None:
        return None if kind is None else (kind, None)
    mixture = _mixture(tree, parts, names)
    if mixture is None or (parts.mlp is not None and kind != mixture[0]):
        return None
    return mixture


def _mixture(tree: Any, parts: Parts, names: Mapping[str, Tensor]) -> tuple[ActivationKind, ExpertsRecipe] | None:
    """What the module computes that router and experts are parts of; one of config.json's numbers may scale it."""
    mixture, layer = parts.mixture, parts.is_dense.index(False)
    assert mixture is not None

    def stored(name: str) -> str:
        return parts.dialect.theirs(f"model.layers.{layer}.{name}")

    path = stored(f"{ROUTER}.weight").rpartition(".")[0].rpartition(".")[0]
    shared = None
    if mixture.shared is not None and stored(f"{mixture.shared.down}.weight").startswith(f"{path}."):
        first = torch.cat([names[stored(f"{name}.weight")] for name in mixture.shared.first])
        shared = first, names[stored(f"{mixture.shared.down}.weight")]
    tensors = MixtureTensors(
        names[stored(f"{ROUTER}.weight")],
        names[stored(JOINED_EXPERTS[0])],
        names[stored(JOINED_EXPERTS[1])],
        correction=names[stored(CORRECTION)] if mixture.has_correction else None,
        shared=shared,
        shared_gate=names[stored(f"{SHARED_GATE}.weight")] if mixture.has_shared_gate else None,
    )
    scaling = _number(tree.config, "routed_scaling_factor")
    reading = experts_reading(tree.get_submodule(path), tensors, (1.0,) if scaling is None else (1.0, scaling))
    if reading is None:
        return None
    is_exact = tensors.router.dtype == torch.float32
    made = replace(reading[1], shared=mixture.shared, has_shared_gate=mixture.has_shared_gate, is_exact=is_exact)
    return reading[0], made


def _activation(tree: Any, parts: Parts, layer: int, names: MlpNames) -> ActivationKind | None:
    """The gate's rows must come first: the recipe goes by names there, and arithmetic has the last word."""
    mlp = _module(tree, parts, layer, names.down.rpartition(".")[0])
    first, down = (linear_parts(_module(tree, parts, layer, name)) for name in (names.first[0], names.down))
    if first is None or down is None:
        return None
    if not names.is_gated:
        return ungated_kind(mlp, first, down)
    candidates = gated_candidates(mlp)
    reading = gated_reading(mlp, candidates) if candidates else None
    if reading is None:
        return None
    return reading.kind if candidates[reading.candidate][0].weight.data_ptr() == first.weight.data_ptr() else None


def _has_parallel_halves(tree: Any, parts: Parts) -> bool:
    """True if the norms before both halves of a layer read the same."""
    if PRE_NORMS.middle not in parts.norms or PRE_NORMS.input not in parts.norms:
        return False
    read: list[Tensor] = []
    norms = [_module(tree, parts, 0, name) for name in (PRE_NORMS.input, PRE_NORMS.middle)]
    hooks = [norm.register_forward_pre_hook(lambda module, args: read.append(args[0])) for norm in norms]
    try:
        record_calls(tree)
    finally:
        for hook in hooks:
            hook.remove()
    return len(read) == 2 and read[0] is read[1]  # attention is not computed here, so numbers would tell nothing


class _Reached(Exception):
    """The first layer got this."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states


def _stop(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs["hidden_states"])


def _embedding_scale(tree: Any, parts: Parts) -> float | None:
    """What rows of the embedding are multiplied by before the first layer sees them, wherever it is done: what comes
    of a table of ones. None if that is no one number."""
    weight = tree.get_input_embeddings().weight
    ones = weight.new_ones(1).expand_as(weight)
    ids = torch.arange(min(4, weight.shape[0])).unsqueeze(0)
    layer = tree.get_submodule(parts.dialect.module("model.layers.0"))
    hook = layer.register_forward_pre_hook(_stop, with_kwargs=True)
    try:
        functional_call(tree, {parts.dialect.theirs(EMBEDDING): ones}, (ids,), {"use_cache": False})
    except _Reached as reached:
        found = reached.hidden_states
    else:
        return None
    finally:
        hook.remove()
    scale = found.flatten()[0]
    if not bool((found == scale).all()) or not float(scale) > 0:
        return None
    named = _number(tree.config, "embedding_multiplier")
    exact = named is not None and bool(torch.tensor(named).to(scale.dtype) == scale)
    return named if exact else float(scale)
