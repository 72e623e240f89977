"""One layer of the fused decoder, op by op: attention and MLP around a residual stream, and what adapters add to them.

The native decoder computes the same from the same tensors; `fused.py` has both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import device_ops, ops
from engine.attention.base import AttentionBackend, PagedLayer
from engine.models.deltas import LowRank, Site, Spans
from engine.models.fused_experts import Experts
from engine.models.fused_parts import Linear, Norm, Weights, order_of_halves, order_of_parts, rotate
from engine.models.fused_recipe import OUTPUT, FusedRecipe, LayerRecipe, MlpNames
from engine.models.native_decoder import LayerTensors
from engine.ops import ActivationKind

Rotation = tuple[Tensor, Tensor]


class _Mlp:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))): x [num_tokens, hidden_size] -> float32."""

    def __init__(self, weights: Weights, path: str, names: MlpNames, activation: ActivationKind) -> None:
        self._activation = None if names.is_gated else activation
        gate = activation if names.is_gated else None
        self.first = weights.linear(*(f"{path}.{name}" for name in names.first), gate=gate)
        self.down = weights.linear(f"{path}.{names.down}", out_dtype=torch.float32)

    def __call__(self, x: Tensor, spans: Spans = ()) -> Tensor:
        inner = self.first(x, spans)
        return self.down(inner if self._activation is None else ops.activation(inner, self._activation), spans)


class Layer:
    """One decoder layer over the residual stream."""

    def __init__(
        self, weights: Weights, path: str, recipe: FusedRecipe, layer: PagedLayer, of_layer: LayerRecipe
    ) -> None:
        self.layer, self.rope = layer, of_layer.rope
        self._recipe = recipe
        places = recipe.places
        self.input_norm = weights.norm_in(path, places.input)
        self._attention_norm = weights.norm_in(path, places.behind_attention, is_wide=True)
        self.middle_norm = weights.norm_in(path, places.middle)
        self._mlp_norm = weights.norm_in(path, places.behind_mlp, is_wide=True)
        linears = (*recipe.qkv, OUTPUT, *recipe.mlp.first, recipe.mlp.down)
        self._paths = {name: weights.module(f"{path}.{name}") for name in linears}
        self._take_heads(weights, path, recipe)
        self._output = weights.linear(f"{path}.{OUTPUT}", out_dtype=torch.float32)
        self._mlp: _Mlp | Experts
        experts, activation = recipe.experts, recipe.activation
        if experts is None or of_layer.is_dense:
            self._mlp = _Mlp(weights, path, recipe.mlp, activation)
        else:
            shared = None if experts.shared is None else _Mlp(weights, path, experts.shared, activation)
            self._mlp = Experts(weights, path, experts, activation, shared)

    def _take_heads(self, weights: Weights, path: str, recipe: FusedRecipe) -> None:
        """What makes queries, keys and values."""
        num_query, num_kv, head_dim = recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim
        rope = None if self.rope is None else recipe.ropes[self.rope]
        rotary_dim = 2 * len(rope.inv_freq) if rope is not None and rope.is_interleaved else 0
        self._order = order_of_parts(num_query, head_dim) if recipe.qkv_by_head else None
        if rotary_dim:
            turned = order_of_halves(num_query + num_kv, head_dim, rotary_dim)
            order = torch.cat([turned, torch.arange(len(turned), (num_query + 2 * num_kv) * head_dim)])
            self._order = order if self._order is None else self._order[order]
        self._qkv = weights.linear(*(f"{path}.{name}" for name in recipe.qkv), order=self._order)
        self._query_norm = self._key_norm = None
        if recipe.has_qk_norms:
            self._query_norm = weights.head_norm(f"{path}.self_attn.q_norm", head_dim, rotary_dim)
            self._key_norm = weights.head_norm(f"{path}.self_attn.k_norm", head_dim, rotary_dim)

    def linears(self) -> tuple[Linear, ...]:
        """Those that adapters may change."""
        mlp = () if isinstance(self._mlp, Experts) else (self._mlp.first, self._mlp.down)
        return (self._qkv, self._output, *mlp)

    @property
    def intermediate_size(self) -> int:
        """Without a mixture of experts, as `tensors`."""
        return self._plain_mlp.down.in_features

    @property
    def _plain_mlp(self) -> _Mlp:
        assert isinstance(self._mlp, _Mlp)
        return self._mlp

    def tensors(self) -> LayerTensors:
        """As the native decoder wants them."""
        norms = (
            self.input_norm,
            self._attention_norm,
            self.middle_norm,
            self._mlp_norm,
            self._query_norm,
            self._key_norm,
        )
        products = (self._qkv, self._output, self._plain_mlp.first, self._plain_mlp.down)
        return LayerTensors._make(
            [
                *(None if norm is None else norm.weight for norm in norms),
                *(tensor for product in products for tensor in (product.packed, product.bias)),
            ]
        )

    def sites(self) -> list[Site]:
        """Where adapters may change the layer; a mixture's experts, what is shared too, are left out."""
        recipe = self._recipe
        heads = [num * recipe.head_dim for num in (recipe.num_query_heads, recipe.num_kv_heads, recipe.num_kv_heads)]
        rows = tuple(heads) if len(recipe.qkv) == len(heads) else (sum(heads),)
        sites = [
            self._site(recipe.qkv, rows, self._qkv, self._order),
            self._site((OUTPUT,), (self._output.out_features,), self._output),
        ]
        if isinstance(self._mlp, Experts):
            return sites
        first, down, names = self._mlp.first, self._mlp.down, recipe.mlp
        num_rows = (2 if names.is_gated else 1) * first.out_features
        rows = (num_rows // len(names.first),) * len(names.first)
        return [
            *sites,
            self._site(names.first, rows, first),
            self._site((names.down,), (down.out_features,), down),
        ]

    def _site(self, names: Sequence[str], rows: tuple[int, ...], linear: Linear, order: Tensor | None = None) -> Site:
        """order: of the weight's rows, if they are not in that of the layers."""

        def adapt(adapter: int, low_rank: LowRank) -> None:
            linear.adapt(adapter, low_rank if order is None else low_rank.with_rows(order))

        return Site(tuple(self._paths[name] for name in names), rows, linear.in_features, adapt)

    def attend(self, x: Tensor, rotation: Rotation | None, backend: AttentionBackend, spans: Spans) -> Tensor:
        query, key, value = self._heads(x, spans)
        query, key = _normed(self._query_norm, query), _normed(self._key_norm, key)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        spec, scale = self.layer.spec, self._recipe.scale
        output = backend.forward(
            query, key, value, self.layer, scale=scale, window=spec.window, softcap=spec.softcap
        )  # fmt: skip
        return self._added(self._output(output.view(x.shape[0], -1), spans), self._attention_norm)

    def attend_in_place(
        self, x: Tensor, tables: device_ops.RotaryTables | None, positions: Tensor, backend: AttentionBackend
    ) -> Tensor:
        """`attend` in fewer calls: norms, rotation and the cache's new rows in one."""
        query, key, value = self._heads(x)
        norms = self._head_norms
        if norms is None:
            query, key = _normed(self._query_norm, query), _normed(self._key_norm, key)
        key_cache, value_cache, metadata = self.layer.attached()
        device_ops.rope_and_cache(
            query, key, value, key_cache, value_cache, metadata.slot_mapping, positions, tables=tables, norms=norms
        )  # fmt: skip
        spec, scale = self.layer.spec, self._recipe.scale
        output = backend.attend(
            query, key, value, self.layer, scale=scale, window=spec.window, softcap=spec.softcap
        )  # fmt: skip
        return self._added(self._output(output.view(x.shape[0], -1)), self._attention_norm)

    def _heads(self, x: Tensor, spans: Spans = ()) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [num_tokens, heads, head_dim], of one product."""
        num_query, num_kv = self._recipe.num_query_heads, self._recipe.num_kv_heads
        heads = self._qkv(x, spans).view(-1, num_query + 2 * num_kv, self._recipe.head_dim)
        return heads[:, :num_query], heads[:, num_query : num_query + num_kv], heads[:, num_query + num_kv :]

    @property
    def _head_norms(self) -> device_ops.HeadNorms | None:
        """Those of queries and keys, if they are of the kind that one call does together with the rotation."""
        query, key = self._query_norm, self._key_norm
        if query is None or key is None or (query.eps, query.variant) != (key.eps, key.variant):
            return None
        is_per_head = query.weight.shape == key.weight.shape == (self._recipe.head_dim,)
        return device_ops.HeadNorms(query.weight, key.weight, query.eps, query.variant) if is_per_head else None

    def feed_forward(self, x: Tensor, spans: Spans) -> Tensor:
        result = self._mlp(x) if isinstance(self._mlp, Experts) else self._mlp(x, spans)
        return self._added(result, self._mlp_norm)

    def _added(self, result: Tensor, norm: Norm | None) -> Tensor:
        """What a half adds to the residual stream, float32."""
        result = result if norm is None else norm(result)
        scale = self._recipe.residual_scale
        return result if scale is None else result.mul_(scale)


def _normed(norm: Norm | None, heads: Tensor) -> Tensor:
    """heads: [num_tokens, num_heads, head_dim], normed each, or all together if the norm is as wide."""
    if norm is None:
        return heads
    if norm.weight.shape[-1] == heads.shape[-1]:
        return norm(heads)
    return norm(heads.flatten(1)).view(heads.shape)


def next_half(norm: Norm | None, x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """residual += x, both float32; what the next half reads of the sum, in `dtype`."""
    return residual.add_(x).to(dtype, copy=True) if norm is None else norm.after_adding(x, residual)
