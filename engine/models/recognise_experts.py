"""What a mixture of experts computes, found out by running it beside every mixture that a recipe can say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.models.fused_experts import route
from engine.models.fused_recipe import ExpertsRecipe
from engine.models.recognise import ACTIVATIONS, NO_MATCH, random_numbers
from engine.ops import ActivationKind

_NUM_ROWS = 8
_SCORES: tuple[Literal["softmax", "sigmoid"], ...] = ("softmax", "sigmoid")


@dataclass(frozen=True, slots=True)
class MixtureTensors:
    """router: [count, hidden]; gate_up: [count, 2 * intermediate, hidden], gate first; down: [count, hidden,
    intermediate]; correction: [count] or None. shared: (gate and up, down) of the MLP beside the experts, if the
    module computes it; shared_gate: [1, hidden] or None."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    correction: Tensor | None = None
    shared: tuple[Tensor, Tensor] | None = None
    shared_gate: Tensor | None = None


def experts_reading(
    module: nn.Module, tensors: MixtureTensors, scalings: Sequence[float]
) -> tuple[ActivationKind, ExpertsRecipe] | None:
    """The mixture that is nearest to what the module computes, one of `scalings` in it; None if none is near."""
    num_chosen = _num_chosen(module, tensors.router.shape[0])
    if num_chosen is None or tensors.down.shape != (*tensors.gate_up.shape[::2], tensors.gate_up.shape[1] // 2):
        return None
    x = random_numbers(_NUM_ROWS, tensors.router.shape[1], dtype=tensors.down.dtype)
    try:
        expected = module(x.unsqueeze(0))[0]
    except NO_MATCH:
        return None
    if not isinstance(expected, Tensor) or expected.shape != x.shape:
        return None
    base = ExpertsRecipe(tensors.router.shape[0], num_chosen, False, has_correction=tensors.correction is not None)
    readings = [
        (_distance(mixed, expected), kind, recipe) for kind, recipe, mixed in _mixtures(x, tensors, base, scalings)
    ]
    distance, kind, recipe = min(readings, key=lambda reading: reading[0])
    return (kind, recipe) if distance <= (1e-5 if x.dtype == torch.float32 else 3e-2) else None


def _distance(ours: Tensor, theirs: Tensor) -> float:
    """Relative to the largest value. In 16 bits the middle one of all rows: some rows' experts are decided by the
    router's rounding."""
    rows = (ours - theirs.float()).abs().amax(-1) / float(theirs.float().abs().max())
    return float(rows.max() if theirs.dtype == torch.float32 else rows.median())


def _num_chosen(module: nn.Module, count: int) -> int | None:
    """The `top_k` that the module or its router has."""
    for part in module.modules():
        value = getattr(part, "top_k", None)
        if isinstance(value, int) and 0 < value <= count:
            return value
    return None


def _mixtures(
    x: Tensor, tensors: MixtureTensors, base: ExpertsRecipe, scalings: Sequence[float]
) -> Iterator[tuple[ActivationKind, ExpertsRecipe, Tensor]]:
    """Every reading with what it makes of x [num_rows, hidden], float32."""
    logits = functional.linear(x.float(), tensors.router.float())
    correction = None if tensors.correction is None else tensors.correction.float().flatten()
    for scores, kind in product(_SCORES, ACTIVATIONS):
        _, experts = route(logits, replace(base, scores=scores), correction)
        each = torch.stack(
            [_chosen(row, chosen, tensors, kind) for row, chosen in zip(x, experts.tolist(), strict=True)]
        )
        beside = _beside(x, tensors, kind)
        for is_normalised, scaling in product((True, False), scalings):
            recipe = replace(base, scores=scores, is_normalised=is_normalised, scaling=scaling)
            weights, _ = route(logits, recipe, correction)
            yield kind, recipe, (each * weights.unsqueeze(-1)).sum(1) + beside


def _chosen(x: Tensor, experts: list[int], tensors: MixtureTensors, kind: ActivationKind) -> Tensor:
    """x: [hidden] -> [len(experts), hidden], float32."""
    return torch.stack([_gated(x, tensors.gate_up[expert], tensors.down[expert], kind) for expert in experts])


def _beside(x: Tensor, tensors: MixtureTensors, kind: ActivationKind) -> Tensor:
    if tensors.shared is None:
        return torch.zeros_like(x, dtype=torch.float32)
    made = _gated(x, *tensors.shared, kind)
    if tensors.shared_gate is None:
        return made
    return made * functional.linear(x.float(), tensors.shared_gate.float()).sigmoid()


def _gated(x: Tensor, gate_up: Tensor, down: Tensor, kind: ActivationKind) -> Tensor:
    gate, up = functional.linear(x, gate_up).chunk(2, -1)
    return functional.linear(ACTIVATIONS[kind](gate) * up, down).float()
