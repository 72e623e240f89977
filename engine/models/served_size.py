"""How much memory a recipe's weights will take, told from shapes and formats before any of them is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch

from engine.models.fused_recipe import (
    CORRECTION,
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    HEAD_BIAS,
    OUTPUT,
    QK_NORMS,
    ROUTER,
    SHARED_GATE,
    ExpertsRecipe,
    FusedRecipe,
    LayerRecipe,
    MlpNames,
)
from engine.models.quantised import PANEL, join_formats
from engine.models.quantiser import Quantiser
from engine.models.tensor_names import stored_name

_LINE = 4 * PANEL  # bytes of a panel's step: one float32 or two bfloat16 values of K


class _Product(NamedTuple):
    """One packed weight. is_exact: never quantised; is_float32: in float32 (on a device it is no larger)."""

    layers: tuple[str, ...]
    is_gated: bool = False
    is_exact: bool = False
    is_float32: bool = False


def _products(recipe: FusedRecipe, layer: LayerRecipe) -> Iterator[_Product]:
    yield _Product(recipe.qkv)
    yield _Product((OUTPUT,))
    if recipe.experts is None or layer.is_dense:
        yield from _of_mlp(recipe.mlp)
    else:
        yield from _of_experts(recipe.experts)


def _of_mlp(names: MlpNames) -> Iterator[_Product]:
    yield _Product(names.first, is_gated=names.is_gated)
    yield _Product((names.down,))


def _of_experts(recipe: ExpertsRecipe) -> Iterator[_Product]:
    yield _Product((ROUTER,), is_exact=True, is_float32=recipe.is_exact)
    if recipe.has_shared_gate:
        yield _Product((SHARED_GATE,), is_exact=True)
    for expert in range(recipe.count):
        path = f"mlp.experts.{expert}"
        yield from _of_mlp(MlpNames((f"{path}.gate_proj", f"{path}.up_proj"), f"{path}.down_proj", True))
    if recipe.shared is not None:
        yield from _of_mlp(recipe.shared)


def served_bytes(
    recipe: FusedRecipe, shapes: Mapping[str, tuple[int, ...]], quantiser: Quantiser | None, dtype: torch.dtype
) -> int:
    """FusedModel.weight_bytes. shapes: by transformers' names; the recipe fits them."""
    sizes = _Sizes(shapes, quantiser, dtype)
    total = sizes.norm(recipe, FINAL_NORM)
    places = recipe.places
    for index, layer in enumerate(recipe.layers):
        path = f"model.layers.{index}"
        total += sum(sizes.product(path, product) for product in _products(recipe, layer))
        if recipe.experts is not None and recipe.experts.has_correction and not layer.is_dense:
            total += prod(sizes.shape(f"{path}.{CORRECTION}")) * torch.float32.itemsize
        for name in (*places.names(), *(QK_NORMS if recipe.has_qk_norms else ())):
            is_wide = name in (places.behind_attention, places.behind_mlp)
            total += sizes.norm(recipe, f"{path}.{name}.weight", is_wide=is_wide)
    head = EMBEDDING if recipe.is_tied else HEAD
    total += sizes.matrix((head,), is_head=True)
    bias_bytes = torch.float32.itemsize if sizes.is_quantised(head) else dtype.itemsize
    total += prod(sizes.shape(HEAD_BIAS, (0,))) * bias_bytes
    if recipe.is_tied:
        return total if sizes.is_quantised(head) else total + sizes.plain(EMBEDDING)
    in_rows = sizes.matrix((EMBEDDING,), is_head=True) if sizes.is_quantised(EMBEDDING) else sizes.plain(EMBEDDING)
    return total + in_rows


class _Sizes:
    def __init__(self, shapes: Mapping[str, tuple[int, ...]], quantiser: Quantiser | None, dtype: torch.dtype) -> None:
        self._shapes, self._quantiser, self._dtype = shapes, quantiser, dtype

    def shape(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Raises KeyError if there is no such tensor and no default."""
        stored = stored_name(name, self._shapes)
        if stored is not None:
            return self._shapes[stored]
        if default is None:
            raise KeyError(name)
        return default

    def plain(self, name: str) -> int:
        return prod(self.shape(name)) * self._dtype.itemsize

    def norm(self, recipe: FusedRecipe, name: str, *, is_wide: bool = False) -> int:
        """is_wide: kept in float32. A layer norm has a bias, if only of zeros."""
        rows = 2 if recipe.norms[name.split(".")[-2]].variant == "layer" else 1
        return rows * prod(self.shape(name)) * (4 if is_wide else self._dtype.itemsize)

    def is_quantised(self, name: str) -> bool:
        """Of a head or an embedding."""
        return self._quantiser is not None and self._quantiser.format(name, is_head=True) is not None

    def product(self, path: str, product: _Product) -> int:
        """With its biases. path: of the layer."""
        names = tuple(f"{path}.{layer}.weight" for layer in product.layers)
        if product.is_float32:
            return _Sizes(self._shapes, None, torch.float32).matrix(names)
        total = self.matrix(names, gated=product.is_gated, is_exact=product.is_exact)
        quantiser = None if product.is_exact else self._quantiser
        is_quantised = quantiser is not None and all(quantiser.format(name) for name in names)
        itemsize = 4 if is_quantised else self._dtype.itemsize
        biases = (self.shape(f"{path}.{layer}.bias", (0,)) for layer in product.layers)
        return total + itemsize * sum(map(prod, biases))

    def matrix(
        self, names: tuple[str, ...], *, gated: bool = False, is_head: bool = False, is_exact: bool = False
    ) -> int:
        shapes = [self.shape(name) for name in names]
        rows, in_features = sum(shape[0] for shape in shapes), shapes[0][1]
        if self._quantiser is not None and not is_exact:
            formats = [self._quantiser.format(name, is_head=is_head) for name in names]
            known = [each for each in formats if each is not None]
            if len(known) == len(names):
                return join_formats(known).packed_bytes(rows, in_features, gated=gated)
        panels = -(-rows // 2 // (PANEL // 2)) if gated else -(-rows // PANEL)
        steps = in_features if self._dtype == torch.float32 else -(-in_features // 32) * 16
        return panels * steps * _LINE
