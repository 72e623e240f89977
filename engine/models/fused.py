"""The fast path: a decoder of the Llama shape in few native calls per layer, and no transformers.

A `FusedRecipe` says everything but the weights; `recipe.py` derives it from a transformers tree, and the self-check
proves it on every model before it is used. Kept with the verdict in the user's cache, it lets a later start go from
weights to model without importing modelling code. Whatever else a model does, it is no recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from engine import device_ops, ops
from engine.attention.base import AttentionBackend, LayerSpec, PagedLayer
from engine.device import HOST
from engine.models.deltas import Site, Spans
from engine.models.fused_layer import Layer, next_half
from engine.models.fused_parts import Frequencies, Weights
from engine.models.fused_recipe import FusedRecipe
from engine.models.native_decoder import DecoderShape, NativeDecoder
from engine.models.quantiser import Quantiser
from engine.models.rope_table import RopeTable
from engine.models.tensor_names import NamedTensors


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
        weights = Weights(NamedTensors(tensors), recipe, quantiser, device)
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
            Layer(weights, f"model.layers.{index}", recipe, self.layers[index], layer)
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
            is_parallel=recipe.is_parallel,
            norms=tuple(None if norm is None else (norm.eps, norm.variant) for norm in norms),
            windows=tuple(layer.window for layer in recipe.layers),
            ropes=tuple(layer.rope for layer in recipe.layers),
        )
        layers = [block.tensors() for block in self._blocks]
        head = self._head
        return NativeDecoder(shape, self._embedding, self._final_norm.weight, head.packed, layers, head.bias)

    @property
    def weight_bytes(self) -> int:
        linears = (linear for block in self._blocks for linear in block.linears())
        return self._weight_bytes + sum(0 if each.deltas is None else each.deltas.num_bytes for each in linears)

    def adapter_sites(self) -> list[Site]:
        """See Computation.adapter_sites."""
        return [site for block in self._blocks for site in block.sites()]

    def finish_adapters(self, num_adapters: int) -> None:
        """See Computation.finish_adapters."""
        linears = [linear for block in self._blocks for linear in block.linears()]
        if self.decoder is None:
            return
        for adapter in range(1, num_adapters + 1):
            self.decoder.adapt([None if each.deltas is None else each.deltas.of(adapter) for each in linears])

    def cover(self, num_positions: int) -> None:
        """Before a forward: rotary rows for positions [0, num_positions)."""
        for rope in self._ropes:
            rope.cover(num_positions)

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """See Computation.step_bytes. Op by op torch's allocator decides: the logits alone."""
        if self.decoder is not None:
            return self.decoder.step_bytes(num_tokens, num_rows)
        return num_rows * self.vocab_size * torch.float32.itemsize

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, spans: Spans = ()) -> Tensor:
        """See Backbone.forward."""
        if self.decoder is not None:
            return self.decoder.forward(input_ids, positions, logits_indices, self.layers, self._ropes, spans)
        return self.logits(self.hidden_states(input_ids, positions, spans)[logits_indices])

    def logits(self, hidden_states: Tensor) -> Tensor:
        """See Backbone.logits."""
        logits = self._head(hidden_states)
        scale, softcap = self._recipe.logits_scale, self._recipe.logits_softcap
        if scale is not None or softcap is not None:
            ops.shape_logits(logits, 1.0 if scale is None else scale, softcap or 0.0)
        return logits

    def hidden_states(self, input_ids: Tensor, positions: Tensor, spans: Spans = ()) -> Tensor:
        """See Backbone.hidden_states."""
        if self.decoder is not None:
            return self.decoder.forward(input_ids, positions, None, self.layers, self._ropes, spans)
        residual = self._embed(input_ids)
        if self._recipe.embedding_scale is not None:
            residual *= self._recipe.embedding_scale
        attend = self._attention(positions, spans)
        is_parallel = self._recipe.is_parallel
        first = self._blocks[0].input_norm
        x = residual.to(self.dtype, copy=True) if first is None else first(residual)
        next_norms = [block.input_norm for block in self._blocks[1:]] + [self._final_norm]
        for block, next_norm in zip(self._blocks, next_norms, strict=True):
            if is_parallel:
                beside = x if block.middle_norm is None else block.middle_norm(residual)
                residual += attend(block, x)
                x = beside
            else:
                x = next_half(block.middle_norm, attend(block, x), residual, self.dtype)
            x = next_half(next_norm, block.feed_forward(x, spans), residual, self.dtype)
        return x

    def _attention(self, positions: Tensor, spans: Spans) -> Callable[[Layer, Tensor], Tensor]:
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
