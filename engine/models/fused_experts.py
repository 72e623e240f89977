"""A mixture of experts op by op: a router, and for each expert that some row chose one gated MLP over those rows.

A row's experts are added up in ascending order in float32, so its bits do not depend on which experts its neighbours
chose.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from engine.models.fused_parts import Weights
from engine.models.fused_recipe import ROUTER, ExpertsRecipe, mixtral_name
from engine.ops import ActivationKind

_OWN_NAME = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def route(logits: Tensor, recipe: ExpertsRecipe) -> tuple[Tensor, Tensor]:
    """logits: [num_tokens, count]. (weights, float32; experts, int64), both [num_tokens, num_chosen]."""
    weights, experts = torch.topk(torch.softmax(logits.float(), -1), recipe.num_chosen, -1)
    if recipe.is_normalised:
        total = weights[:, :1]
        for column in range(1, recipe.num_chosen):  # one by one: torch's sum may go another way for other batches
            total = total + weights[:, column : column + 1]
        weights = weights / total
    return weights, experts


class Experts:
    """The MLP of one layer."""

    def __init__(self, weights: Weights, path: str, recipe: ExpertsRecipe, activation: ActivationKind) -> None:
        """path: of the layer."""
        self._recipe = recipe
        self._router = weights.linear(f"{path}.{ROUTER}", is_exact=True)
        names = [f"{path}.mlp.experts.{index}" for index in range(recipe.count)]
        self._gate_ups = [weights.linear(f"{n}.gate_proj", f"{n}.up_proj", gate=activation) for n in names]
        self._downs = [weights.linear(f"{n}.down_proj", out_dtype=torch.float32) for n in names]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size] -> float32."""
        weights, experts = route(self._router(x), self._recipe)
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
        return total


class ExpertTensors(Mapping[str, Tensor]):
    """A checkpoint's or a tree's tensors under the names of FusedRecipe.tensor_names, every expert's matrices apart,
    whether they are stored so, in one tensor for all experts, or under Mixtral's names."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        for stored in (name, mixtral_name(name)):
            if stored in self._tensors:
                return self._tensors[stored]
        found = _OWN_NAME.fullmatch(name)
        if found is None:
            raise KeyError(name)
        path, expert, part = found[1], int(found[2]), found[3]
        if part == "down":
            return self._tensors[f"{path}.down_proj"][expert]
        gate, up = self._tensors[f"{path}.gate_up_proj"][expert].chunk(2)
        return gate if part == "gate" else up

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
