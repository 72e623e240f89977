"""Adapters in a transformers tree: its packed linear layers, each asking which rows of the forward have which adapter.

Knows the tree's modules by name; what is added is `deltas.py`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from engine import ops
from engine.config import StartError
from engine.models.deltas import Deltas, LowRank, Site, Spans
from engine.models.swap_modules import PackedLinear


@dataclass(slots=True)
class CurrentForward:
    """What the modules of one tree must know of the forward in progress."""

    num_tokens: int = 0
    spans: Spans = ()


class AdaptedLinear(nn.Module):
    """A PackedLinear whose product adapters add to. One row per token of the forward comes in."""

    def __init__(self, path: str, plain: PackedLinear, current: CurrentForward) -> None:
        super().__init__()
        self.deltas = Deltas()
        self.plain = plain
        self._path, self._current = path, current

    def forward(self, x: Tensor) -> Tensor:
        plain, spans = self.plain, self._current.spans
        if x.numel() // plain.in_features != self._current.num_tokens:
            raise StartError(f"{self._path} does not multiply one row for each token, so no adapter can change it.")
        if not self.deltas.change(spans):
            y: Tensor = plain(x)
            return y
        rows = x.reshape(-1, plain.in_features)
        product = ops.linear(rows, plain.packed, plain.bias, plain.out_features, out_dtype=torch.float32)
        total = self.deltas.added(rows, product, spans).to(x.dtype)
        return total.view(*x.shape[:-1], plain.out_features)


def adapter_sites(tree: Any, current: CurrentForward) -> list[Site]:
    """Every packed linear layer but the head. A layer becomes an AdaptedLinear with the first adapter that it gets."""
    modules = list(tree.named_modules())
    adapted = [(path, each.plain) for path, each in modules if isinstance(each, AdaptedLinear)]
    others = {id(tree.get_output_embeddings()), *(id(plain) for _, plain in adapted)}
    packed = [(path, each) for path, each in modules if isinstance(each, PackedLinear) and id(each) not in others]
    return [_site(tree, path, plain, current) for path, plain in (*adapted, *packed)]


def _site(tree: nn.Module, path: str, plain: PackedLinear, current: CurrentForward) -> Site:
    def adapt(adapter: int, low_rank: LowRank) -> None:
        module: nn.Module = tree.get_submodule(path)
        if not isinstance(module, AdaptedLinear):
            module = AdaptedLinear(path, plain, current)
            parent, _, name = path.rpartition(".")
            setattr(tree.get_submodule(parent), name, module)
        module.deltas.put(adapter, low_rank)

    return Site((path,), (plain.out_features,), plain.in_features, adapt)
