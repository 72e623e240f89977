"""How much memory a recipe's weights will take, told from shapes and formats before any of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from engine.models.fused import EMBEDDING, FINAL_NORM, HEAD, FusedRecipe
from engine.models.quantised import PANEL, join_formats
from engine.models.quantiser import Quantiser

_PRODUCTS = (  # of a layer, as the fused decoder packs them; of "gate" a panel has as many rows as of "up"
    tuple(f"self_attn.{name}_proj" for name in "qkv"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
_LINE = 4 * PANEL  # bytes of a panel's step: one float32 or two bfloat16 values of K


def served_bytes(
    recipe: FusedRecipe, shapes: Mapping[str, tuple[int, ...]], quantiser: Quantiser | None, dtype: torch.dtype
) -> int:
    """FusedModel.weight_bytes. shapes: by transformers' names; the recipe fits them."""
    sizes = _Sizes(shapes, quantiser, dtype)
    total = sizes.plain(FINAL_NORM)
    for index in range(len(recipe.layers)):
        path = f"model.layers.{index}"
        total += sum(sizes.product(*(f"{path}.{name}" for name in names)) for names in _PRODUCTS)
        total += sum(sizes.plain(name) for name in shapes if name.startswith(f"{path}.") and "norm" in name)
    head = EMBEDDING if recipe.is_tied else HEAD
    total += sizes.matrix((head,), is_head=True)
    if recipe.is_tied:
        return total if sizes.is_quantised(head) else total + sizes.plain(EMBEDDING)
    in_rows = sizes.matrix((EMBEDDING,), is_head=True) if sizes.is_quantised(EMBEDDING) else sizes.plain(EMBEDDING)
    return total + in_rows


class _Sizes:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], quantiser: Quantiser | None, dtype: torch.dtype) -> None:
        self._shapes, self._quantiser, self._dtype = shapes, quantiser, dtype

    def plain(self, name: str) -> int:
        return prod(self._shapes[name]) * self._dtype.itemsize

    def is_quantised(self, name: str) -> bool:
        """Of a head or an embedding."""
        return self._quantiser is not None and self._quantiser.format(name, is_head=True) is not None

    def product(self, *layers: str) -> int:
        """Several layers' rows as one packed weight, with their biases."""
        names = tuple(f"{layer}.weight" for layer in layers)
        total = self.matrix(names, gated="gate" in layers[0])
        is_quantised = self._quantiser is not None and all(self._quantiser.format(name) for name in names)
        itemsize = 4 if is_quantised else self._dtype.itemsize
        return total + itemsize * sum(prod(self._shapes.get(f"{layer}.bias", (0,))) for layer in layers)

    def matrix(self, names: tuple[str, ...], *, gated: bool = False, is_head: bool = False) -> int:
        rows, in_features = sum(self._shapes[name][0] for name in names), self._shapes[names[0]][1]
        if self._quantiser is not None:
            formats = [self._quantiser.format(name, is_head=is_head) for name in names]
            known = [each for each in formats if each is not None]
            if len(known) == len(names):
                return join_formats(known).packed_bytes(rows, in_features, gated=gated)
        panels = -(-rows // 2 // (PANEL // 2)) if gated else -(-rows // PANEL)
        steps = in_features if self._dtype == torch.float32 else -(-in_features // 32) * 16
        return panels * steps * _LINE
