"""How a tree rotates its heads: the frequencies it keeps, and what became of one token's keys at two positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engine.attention.base import LayerSpec
from engine.models.attention_hook import RecordedCall
from engine.models.fused_recipe import LayerRecipe, RopeRecipe


def rotated(
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


def ropes_of(tree: Any, head_dim: int) -> dict[str, RopeRecipe] | None:
    """By layer type, "" where one serves all; None unless frequencies are fixed and no more than the head has room
    for."""
    module = getattr(tree.base_model, "rotary_emb", None)
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
