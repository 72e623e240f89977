"""Derives a `FusedRecipe` from a transformers tree: by parameter names, then by what its modules compute.

Only proposes. A tree may do things between its modules that no module shows (another order of norms, scales without a
name in config.json); the self-check compares the proposal with the tree before anyone believes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

from engine.attention.base import LayerSpec
from engine.models.attention_hook import RecordedCall
from engine.models.fused_recipe import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    JOINED_EXPERTS,
    JOINED_QKV,
    MLPS,
    OUTPUT,
    PLACES,
    QK_NORMS,
    ROUTER,
    SPLIT_GATE_UP,
    SPLIT_QKV,
    ExpertsRecipe,
    FusedRecipe,
    LayerRecipe,
    MlpNames,
    NormRecipe,
    RopeRecipe,
)
from engine.models.recognise import (
    experts_reading,
    gated_candidates,
    gated_reading,
    linear_parts,
    norm_eps,
    norm_variant,
    ungated_kind,
)
from engine.ops import ActivationKind


class _Parts(NamedTuple):
    """What a layer is made of, by the names of its modules. mlp: None for a mixture of experts."""

    norms: tuple[str, ...]
    qkv: tuple[str, ...]
    mlp: MlpNames | None

    @property
    def linears(self) -> tuple[tuple[str, ...], ...]:
        """Those that may have a bias; together if they become one product."""
        return (self.qkv, (OUTPUT,), *((self.mlp.first, (self.mlp.down,)) if self.mlp else ()))

    @property
    def tensors(self) -> tuple[str, ...]:
        """All that have to be there, by name within the layer."""
        modules = (*self.norms, *(name for group in self.linears for name in group))
        return (*(f"{m}.weight" for m in modules), *(() if self.mlp else (f"{ROUTER}.weight", *JOINED_EXPERTS)))


@torch.inference_mode()
def derive_recipe(tree: Any, recorded: list[RecordedCall], specs: list[LayerSpec]) -> FusedRecipe | None:
    """A recipe that may fit an unswapped tree; None if its structure already says no."""
    names = dict(tree.named_parameters())
    is_tied = HEAD not in names
    parts = _layer_parts(names, len(specs), is_tied)
    if parts is None or any(True for spec in specs if spec.chunk or spec.has_sinks):
        return None
    first = specs[0]
    uniform = all(_shape(spec) == _shape(first) for spec in specs) and first.key_dim == first.value_dim
    if not uniform or len({call.scale for call in recorded}) != 1:
        return None
    norms = _norms(tree, parts.norms)
    mlp = _mlp(tree.model.layers[0].mlp, parts, names)
    ropes = _ropes(tree, first.key_dim)
    scale = _embedding_scale(tree)
    rotated = None if ropes is None else _rotated(tree, recorded, specs, ropes)
    if norms is None or mlp is None or scale is None or rotated is None:
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
        ropes=rotated[0],
        layers=rotated[1],
        residual_scale=_number(tree.config, "residual_multiplier"),
        logits_scale=_number(tree.config, "logit_scale") if divisor is None else 1 / divisor,
        logits_softcap=_number(tree.config, "final_logit_softcapping"),
        qkv=parts.qkv,
        mlp=parts.mlp or SPLIT_GATE_UP,
        experts=mlp[1],
    )


def _shape(spec: LayerSpec) -> tuple[object, ...]:
    return spec.num_query_heads, spec.num_kv_heads, spec.key_dim, spec.value_dim, spec.softcap


def _number(config: Any, name: str) -> float | None:
    """A positive number other than one that config.json names, None if there is none."""
    value = getattr(config, name, None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0 or value == 1:
        return None
    return float(value)


def _layer_parts(names: Mapping[str, Tensor], num_layers: int, is_tied: bool) -> _Parts | None:
    """What one layer is made of, if the tree has exactly the parameters of a recipe; biases are optional."""
    present = {name for name in names if not name.endswith(".bias")}
    biases = {name.removesuffix(".bias") for name in names if name.endswith(".bias")}
    for places, norms, qkv, mlp in product(PLACES, ((), QK_NORMS), (SPLIT_QKV, JOINED_QKV), (*MLPS, None)):
        parts = _Parts((*places.names(), *norms), qkv, mlp)
        wanted = {f"model.layers.{index}.{tensor}" for index in range(num_layers) for tensor in parts.tensors}
        if present == wanted | {EMBEDDING, FINAL_NORM} | (set() if is_tied else {HEAD}):
            return parts if _biases_fit(biases, num_layers, parts) else None
    return None


def _biases_fit(biases: set[str], num_layers: int, parts: _Parts) -> bool:
    """Linear layers and norms only, the same in every layer, and all or none of those that become one product."""
    in_layers = {name for name in biases if name.startswith("model.layers.")}
    suffixes = {name.split(".", 3)[3] for name in in_layers}
    groups = parts.linears
    known = {*parts.norms, *(module for group in groups for module in group)}
    if not suffixes <= known or not biases - in_layers <= {FINAL_NORM.removesuffix(".weight")}:
        return False
    whole = len(in_layers) == len(suffixes) * num_layers
    return whole and all(len(suffixes & set(group)) in (0, len(group)) for group in groups)


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


def _mlp(
    module: torch.nn.Module, parts: _Parts, names: Mapping[str, Tensor]
) -> tuple[ActivationKind, ExpertsRecipe | None] | None:
    """What layer 0's MLP computes."""
    if parts.mlp is not None:
        kind = _activation(module, parts.mlp)
        return None if kind is None else (kind, None)
    tensors = [names[f"model.layers.0.{name}"] for name in (f"{ROUTER}.weight", *JOINED_EXPERTS)]
    reading = experts_reading(module, *tensors)
    if reading is None:
        return None
    return reading.kind, ExpertsRecipe(tensors[0].shape[0], reading.num_chosen, reading.is_normalised)


def _activation(mlp: torch.nn.Module, names: MlpNames) -> ActivationKind | None:
    """The gate's rows must come first: the recipe goes by names there, and arithmetic has the last word."""
    first, down = (linear_parts(mlp.get_submodule(name.removeprefix("mlp."))) for name in (names.first[0], names.down))
    if first is None or down is None:
        return None
    if not names.is_gated:
        return ungated_kind(mlp, first, down)
    candidates = gated_candidates(mlp)
    reading = gated_reading(mlp, candidates) if candidates else None
    if reading is None:
        return None
    return reading.kind if candidates[reading.candidate][0].weight.data_ptr() == first.weight.data_ptr() else None


def _rotated(
    tree: Any, recorded: list[RecordedCall], specs: list[LayerSpec], ropes: Mapping[str, RopeRecipe]
) -> tuple[tuple[RopeRecipe, ...], tuple[LayerRecipe, ...]] | None:
    """Ropes and layers, by what became of every layer's keys; None if something else happened to them. ropes: by layer
    type, "" if there is one for all."""
    keys = list(ropes)
    kinds = list(getattr(tree.config, "layer_types", None) or ()) if len(keys) > 1 else keys * len(specs)
    if len(kinds) != len(specs) or any(kind not in ropes for kind in kinds):
        return None
    ways = [_rotation(call, ropes[kind]) for call, kind in zip(recorded, kinds, strict=True)]
    if "unknown" in ways or {"halves", "neighbours"} <= set(ways):
        return None
    layers = tuple(
        LayerRecipe(spec.window, None if way == "none" else keys.index(kind))
        for spec, kind, way in zip(specs, kinds, ways, strict=True)
    )
    return tuple(replace(rope, is_interleaved="neighbours" in ways) for rope in ropes.values()), layers


def _rotation(call: RecordedCall, rope: RopeRecipe) -> str:
    """How one token's keys at position 0 became those at the last position: "halves", "neighbours" or "none"."""
    first, last = call.keys[:, 0].float(), call.keys[:, -1].float()
    angles = torch.tensor(rope.inv_freq) * (call.keys.shape[1] - 1)
    tolerance = (1e-5 if call.keys.dtype == torch.float32 else 2e-2) * float(last.abs().max())
    if float((first - last).abs().max()) <= tolerance:
        return "none"
    for way in ("halves", "neighbours"):
        if float((_turned(first, angles, way) - last).abs().max()) <= tolerance:
            return way
    return "unknown"


def _turned(heads: Tensor, angles: Tensor, way: str) -> Tensor:
    """heads: [num_heads, head_dim], of which the first 2 * len(angles) elements are rotated."""
    width = 2 * len(angles)
    turned = heads[:, :width]
    one, other = turned.chunk(2, -1) if way == "halves" else (turned[:, ::2], turned[:, 1::2])
    parts = [one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()]
    together = torch.cat(parts, -1) if way == "halves" else torch.stack(parts, -1).flatten(-2)
    return torch.cat([together, heads[:, width:]], -1)


def _ropes(tree: Any, head_dim: int) -> dict[str, RopeRecipe] | None:
    """By layer type, "" where one serves all; None unless frequencies are fixed and no more than the head has room
    for."""
    module = getattr(tree.model, "rotary_emb", None)
    kinds = getattr(module, "rope_type", None)
    if module is None or kinds is None:
        return None
    ropes = {}
    for key in kinds if isinstance(kinds, dict) else ("",):
        prefix = f"{key}_" if key else ""
        inv_freq = getattr(module, f"{prefix}inv_freq", None)
        if not isinstance(inv_freq, Tensor) or not 0 < inv_freq.numel() * 2 <= head_dim:
            return None
        scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
        ropes[key] = RopeRecipe(tuple(inv_freq.float().tolist()), scaling)
    return ropes


class _Reached(Exception):
    """The first layer got this."""

    def __init__(self, hidden_states: Tensor) -> None:
        super().__init__()
        self.hidden_states = hidden_states


def _stop(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise _Reached(args[0] if args else kwargs["hidden_states"])


def _embedding_scale(tree: Any) -> float | None:
    """What rows of the embedding are multiplied by before the first layer sees them, wherever it is done: what comes
    of a table of ones. None if that is no one number."""
    weight = tree.get_input_embeddings().weight
    ones = weight.new_ones(1).expand_as(weight)
    ids = torch.arange(min(4, weight.shape[0])).unsqueeze(0)
    hook = tree.model.layers[0].register_forward_pre_hook(_stop, with_kwargs=True)
    try:
        functional_call(tree.model, {EMBEDDING.removeprefix("model."): ones}, (ids,), {"use_cache": False})
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
