"""A mixture of experts op by op: a router, and for each expert that some row chose one gated MLP over those rows.

A row's experts are added up in ascending order in float32, what is shared last, so its bits do not depend on which
experts its neighbours chose.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from engine.models.fused_parts import Linear, Weights
from engine.models.fused_recipe import CORRECTION, ROUTER, SHARED_GATE, ExpertsRecipe
from engine.ops import ActivationKind


def sigmoid(x: Tensor) -> Tensor:
    """x: [num_tokens, count], float32. Of each row's softmax with a zero beside it, which is computed row by row:
    torch's own sigmoid rounds the last few elements of a tensor otherwise than the rest, so a value would depend on
    its neighbours. Past 64 there is nothing to tell apart."""
    shares = torch.softmax(functional.pad(x.clamp(-64, 64), (0, 1)), -1)
    own, zero = shares[:, :-1], shares[:, -1:]
    return own / (own + zero)


def route(logits: Tensor, recipe: ExpertsRecipe, correction: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """logits: [num_tokens, count], float32; correction: [count]. (weights, float32; experts, int64), both
    [num_tokens, num_chosen]."""
    scores = torch.softmax(logits, -1) if recipe.scores == "softmax" else sigmoid(logits)
    experts = torch.topk(scores if correction is None else scores + correction, recipe.num_chosen, -1).indices
    weights = scores.gather(-1, experts)
    if recipe.is_normalised:
        total = weights[:, :1]
        for column in range(1, recipe.num_chosen):  # one by one: torch's sum may go another way for other batches
            total = total + weights[:, column : column + 1]
        weights = weights / total
    return weights * recipe.scaling, experts


class Experts:
    """The MLP of one layer."""

    def __init__(
        self,
        weights: Weights,
        path: str,
        recipe: ExpertsRecipe,
        activation: ActivationKind,
        shared: Callable[[Tensor], Tensor] | None,
    ) -> None:
        """path: of the layer. shared: the MLP beside the experts, -> float32."""
        self._recipe, self._shared = recipe, shared
        self._router_dtype = torch.float32 if recipe.is_exact and weights.is_on_cpu else weights.dtype
        self._router = weights.linear(f"{path}.{ROUTER}", exact=self._router_dtype, out_dtype=torch.float32)
        self._correction = weights.float32(f"{path}.{CORRECTION}") if recipe.has_correction else None
        self._shared_gate: Linear | None = None
        if recipe.has_shared_gate:
            name = f"{path}.{SHARED_GATE}"
            self._shared_gate = weights.linear(name, exact=weights.dtype, out_dtype=torch.float32)
        names = [f"{path}.mlp.experts.{index}" for index in range(recipe.count)]
        self._gate_ups = [weights.linear(f"{n}.gate_proj", f"{n}.up_proj", gate=activation) for n in names]
        self._downs = [weights.linear(f"{n}.down_proj", out_dtype=torch.float32) for n in names]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size] -> float32."""
        weights, experts = route(self._router(x.to(self._router_dtype)), self._recipe, self._correction)
        order = experts.flatten().argsort(stable=True)
        rows, weights = order // self._recipe.num_chosen, weights.flatten()[order].unsqueeze(1)
        total = x.new_zeros(x.shape, dtype=torch.float32)
        start = 0
        for expert, count in enumerate(torch.bincount(experts.flatten(), minlength=self._recipe.count).tolist()):
            if count:
                own = rows[start : start + count]
                result = self._downs[expert](self._gate_ups[expert](x[own]))
                total.index_add_(0, own, result * weights[start : start + count])
                start += count
        return total if self._shared is None else total.add_(self._beside(self._shared(x), x))

    def _beside(self, shared: Tensor, x: Tensor) -> Tensor:
        """What the shared expert made of x, as far as it is let through."""
        return shared if self._shared_gate is None else shared.mul_(sigmoid(self._shared_gate(x)))
