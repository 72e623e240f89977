"""The fast path: a decoder of the Llama shape in few native calls per layer, and no transformers.

A `FusedRecipe` says everything but the weights; `recipe.py` derives it from a transformers tree, and the self-check
proves it on every model before it is used. Kept with the verdict in the user's cache, it lets a later start go from
weights to model without importing modelling code. Whatever else a model does, it is no recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine import device_ops, ops
from engine.attention.base import AttentionBackend, LayerSpec, PagedLayer
from engine.device import HOST
from engine.models.deltas import LowRank, Site, Spans
from engine.models.fused_experts import Experts, ExpertTensors
from engine.models.fused_parts import Frequencies, Linear, Norm, Weights, order_of_halves, rotate
from engine.models.fused_recipe import OUTPUT, PARALLEL_NORM, FusedRecipe
from engine.models.native_decoder import DecoderShape, LayerTensors, NativeDecoder
from engine.models.quantiser import Quantiser
from engine.models.rope_table import RopeTable

Rotation = tuple[Tensor, Tensor]


class _Mlp:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))): x [num_tokens, hidden_size] -> float32."""

    def __init__(self, weights: Weights, path: str, recipe: FusedRecipe) -> None:
        names = recipe.mlp
        self._activation = None if names.is_gated else recipe.activation
        gate = recipe.activation if names.is_gated else None
        self.first = weights.linear(*(f"{path}.{name}" for name in names.first), gate=gate)
        self.down = weights.linear(f"{path}.{names.down}", out_dtype=torch.float32)

    def __call__(self, x: Tensor, spans: Spans) -> Tensor:
        inner = self.first(x, spans)
        return self.down(inner if self._activation is None else ops.activation(inner, self._activation), spans)


class _Layer:
    """One decoder layer over the residual stream."""

    def __init__(self, weights: Weights, path: str, recipe: FusedRecipe, layer: PagedLayer, rope: int | None) -> None:
        self.layer, self.rope = layer, rope
        self._recipe = recipe
        places = recipe.places
        self.input_norm = weights.norm_in(path, places.input)
        self._attention_norm = weights.norm_in(path, places.behind_attention, is_wide=True)
        self.middle_norm = weights.norm_in(path, places.middle)
        self._mlp_norm = weights.norm_in(path, places.behind_mlp, is_wide=True)
        self._take_heads(weights, path, recipe)
        self._output = weights.linear(f"{path}.{OUTPUT}", out_dtype=torch.float32)
        self._mlp: _Mlp | Experts
        if recipe.experts is None:
            self._mlp = _Mlp(weights, path, recipe)
        else:
            self._mlp = Experts(weights, path, recipe.experts, recipe.activation)

    def _take_heads(self, weights: Weights, path: str, recipe: FusedRecipe) -> None:
        """What makes queries, keys and values."""
        num_query, num_kv, head_dim = recipe.num_query_heads, recipe.num_kv_heads, recipe.head_dim
        rope = None if self.rope is None else recipe.ropes[self.rope]
        rotary_dim = 2 * len(rope.inv_freq) if rope is not None and rope.is_interleaved else 0
        self._order = order = None
        if rotary_dim:
            turned = order_of_halves(num_query + num_kv, head_dim, rotary_dim)
            self._order = order = torch.cat([turned, torch.arange(len(turned), (num_query + 2 * num_kv) * head_dim)])
        self._qkv = weights.linear(*(f"{path}.{name}" for name in recipe.qkv), order=order)
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

    def sites(self, path: str) -> list[Site]:
        """Where adapters may change the layer `path`; a mixture's experts are left out."""
        recipe = self._recipe
        heads = [num * recipe.head_dim for num in (recipe.num_query_heads, recipe.num_kv_heads, recipe.num_kv_heads)]
        rows = tuple(heads) if len(recipe.qkv) == len(heads) else (sum(heads),)
        sites = [
            _site(path, recipe.qkv, rows, self._qkv, self._order),
            _site(path, (OUTPUT,), (self._output.out_features,), self._output),
        ]
        if isinstance(self._mlp, Experts):
            return sites
        first, down, names = self._mlp.first, self._mlp.down, recipe.mlp
        num_rows = (2 if names.is_gated else 1) * first.out_features
        rows = (num_rows // len(names.first),) * len(names.first)
        return [
            *sites,
            _site(path, names.first, rows, first),
            _site(path, (names.down,), (down.out_features,), down),
        ]

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


def _site(path: str, names: Sequence[str], rows: tuple[int, ...], linear: Linear, order: Tensor | None = None) -> Site:
    """order: of the weight's rows, if they are not in that of the layers."""

    def adapt(adapter: int, low_rank: LowRank) -> None:
        linear.adapt(adapter, low_rank if order is None else low_rank.with_rows(order))

    return Site(tuple(f"{path}.{name}" for name in names), rows, linear.in_features, adapt)


def _normed(norm: Norm | None, heads: Tensor) -> Tensor:
    """heads: [num_tokens, num_heads, head_dim], normed each, or all together if the norm is as wide."""
    if norm is None:
        return heads
    if norm.weight.shape[-1] == heads.shape[-1]:
        return norm(heads)
    return norm(heads.flatten(1)).view(heads.shape)


def _next(norm: Norm | None, x: Tensor, residual: Tensor, dtype: torch.dtype) -> Tensor:
    """residual += x, both float32; what the next half reads of the sum, in `dtype`."""
    return residual.add_(x).to(dtype, copy=True) if norm is None else norm.after_adding(x, residual)


class FusedModel:
    """A recipe with its weights: what `Backbone` computes with."""

    tells_hidden_states = True

    def __init__(
        self,
        recipe: FusedRecipe,
        tensors: Mapping[str, Tensor],
        backend: AttentionBackend,
        max_positions: int,
        quantiser: Quantiser | None = None,
        *,
        device: torch.device = HOST,
        stepwise: bool = False,
    ) -> None:
        """tensors: by transformers' names, all of one dtype. quantiser: of linear layers' weights; None: none is
        quantised. device: where to compute, wherever the tensors are. stepwise: op by op also where there is a decoder
        in one call. Raises StartError if a tensor is missing."""
        named = tensors if recipe.experts is None else ExpertTensors(tensors)
        weights = Weights(named, recipe, quantiser, device)
        self._recipe = recipe
        self.device = device
        self.is_capturable = recipe.experts is None  # a mixture asks the device how many rows an expert has
        self.writes_in_place = device.type == "cuda"
        self._final_norm = weights.norm("model.norm")
        self.vocab_size = recipe.vocab_size
        self.hidden_size = self._final_norm.weight.shape[-1]
        self.dtype = self._final_norm.weight.dtype
        self._backend = backend
        self.layers = tuple(
            PagedLayer(
                index,
                LayerSpec(
                    num_query_heads=recipe.num_query_heads,
                    num_kv_heads=recipe.num_kv_heads,
                    key_dim=recipe.head_dim,
                    value_dim=recipe.head_dim,
                    window=layer.window,
                    softcap=recipe.softcap,
                ),
            )
            for index, layer in enumerate(recipe.layers)
        )
        self._blocks = [
            _Layer(weights, f"model.layers.{index}", recipe, self.layers[index], layer.rope)
            for index, layer in enumerate(recipe.layers)
        ]
        self._head = weights.head()
        self._embedding = weights.embedding(self._head)
        self._weight_bytes = weights.num_bytes
        self.quantization = "+".join(sorted(weights.kinds)) if any("int" in kind for kind in weights.kinds) else "none"
        self._ropes = [RopeTable(Frequencies(rope), (), self.dtype, max_positions, device) for rope in recipe.ropes]
        is_native = backend.name == "native" and recipe.experts is None and device.type == "cpu" and not stepwise
        self.decoder = self._native_decoder(recipe) if is_native else None

    def _native_decoder(self, recipe: FusedRecipe) -> NativeDecoder:
        """Over the same tensors: all of a forward in one call, to the same bits."""
        norms = [recipe.norms.get(name or "") for name in (*recipe.places, "q_norm", "k_norm", "norm")]
        shape = DecoderShape(
            num_query_heads=recipe.num_query_heads,
            num_kv_heads=recipe.num_kv_heads,
            head_dim=recipe.head_dim,
            intermediate_size=self._blocks[0].intermediate_size,
            vocab_size=self._head.out_features,
            scale=recipe.scale,
            softcap=recipe.softcap,
            embedding_scale=recipe.embedding_scale,
            residual_scale=recipe.residual_scale,
            logits_scale=recipe.logits_scale,
            logits_softcap=recipe.logits_softcap,
            activation=recipe.activation,
            is_gated=recipe.mlp.is_gated,
            is_parallel=recipe.places == PARALLEL_NORM,
            norms=tuple(None if norm is None else (norm.eps, norm.variant) for norm in norms),
            windows=tuple(layer.window for layer in recipe.layers),
            ropes=tuple(layer.rope for layer in recipe.layers),
        )
        layers = [block.tensors() for block in self._blocks]
        return NativeDecoder(shape, self._embedding, self._final_norm.weight, self._head.packed, layers)

    @property
    def weight_bytes(self) -> int:
        linears = (linear for block in self._blocks for linear in block.linears())
        return self._weight_bytes + sum(0 if each.deltas is None else each.deltas.num_bytes for each in linears)

    def adapter_sites(self) -> list[Site]:
        """See Computation.adapter_sites."""
        return [site for index, block in enumerate(self._blocks) for site in block.sites(f"model.layers.{index}")]

    def check_adapters(self) -> None:
        """See Computation.check_adapters: every site is a product over all tokens."""

    def cover(self, num_positions: int) -> None:
        """Before a forward: rotary rows for positions [0, num_positions)."""
        for rope in self._ropes:
            rope.cover(num_positions)

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """See Computation.step_bytes. Op by op torch's allocator decides: the logits alone, and beside the decoder the
        largest of what steps with adapters want."""
        if self.decoder is not None:
            widest = max((each.adapted_bytes for block in self._blocks for each in block.linears()), default=0)
            return self.decoder.step_bytes(num_tokens, num_rows) + num_tokens * widest
        return num_rows * self.vocab_size * torch.float32.itemsize

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, spans: Spans = ()) -> Tensor:
        """See Backbone.forward."""
        if self.decoder is not None and not spans:
            return self.decoder.forward(input_ids, positions, logits_indices, self.layers, self._ropes)
        return self.logits(self.hidden_states(input_ids, positions, spans)[logits_indices])

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See Backbone.logits."""
        logits = self._head(hidden_states)
        scale, softcap = self._recipe.logits_scale, self._recipe.logits_softcap
        if scale is not None or softcap is not None:
            ops.shape_logits(logits, 1.0 if scale is None else scale, softcap or 0.0)
        return logits

    def hidden_states(self, input_ids: Tensor, positions: Tensor, spans: Spans = ()) -> Tensor:
        """See Backbone.hidden_states. Adapters are added op by op."""
        if self.decoder is not None and not spans:
            return self.decoder.forward(input_ids, positions, None, self.layers, self._ropes)
        residual = self._embed(input_ids)
        if self._recipe.embedding_scale is not None:
            residual *= self._recipe.embedding_scale
        attend = self._attention(positions, spans)
        is_parallel = self._recipe.places == PARALLEL_NORM
        first = self._blocks[0].input_norm
        x = residual.to(self.dtype, copy=True) if first is None else first(residual)
        next_norms = [block.input_norm for block in self._blocks[1:]] + [self._final_norm]
        for block, next_norm in zip(self._blocks, next_norms, strict=True):
            after_attention = _next(block.middle_norm, attend(block, x), residual, self.dtype)
            x = x if is_parallel else after_attention
            x = _next(next_norm, block.feed_forward(x, spans), residual, self.dtype)
        return x

    def _attention(self, positions: Tensor, spans: Spans) -> Callable[[_Layer, Tensor], Tensor]:
        """What a layer's attention adds, for tokens at these positions."""
        if self.writes_in_place:
            tables = [device_ops.RotaryTables(*rope.rows()) for rope in self._ropes]
            return lambda block, x: block.attend_in_place(
                x, None if block.rope is None else tables[block.rope], positions, self._backend
            )
        rotations = []
        for rope in self._ropes:
            cos, sin = rope(self._final_norm.weight, positions)
            rotations.append((cos.unsqueeze(1), sin.unsqueeze(1)))  # [num_tokens, 1, head_dim]
        return lambda block, x: block.attend(
            x, None if block.rope is None else rotations[block.rope], self._backend, spans
        )

    def _embed(self, input_ids: Tensor) -> Tensor:
        """[num_tokens, hidden_size], float32."""
        if self._embedding.dtype != torch.uint8:
            return functional.embedding(input_ids, self._embedding).float()
        like = self._final_norm.weight.new_empty(self.hidden_size, dtype=torch.float32)
        return ops.embed_quant(input_ids, self._embedding, like, self.vocab_size)
