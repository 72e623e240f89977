"""A whole forward in one native call: the handle of a decoder that csrc walks through with threads of its own.

Knows tensors and their order, not where they come from. `fused.py` fills it and keeps a way of its own, op by op, that
gives the same bits and serves other backends.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import NamedTuple

from torch import Tensor

from engine import decoder_ops
from engine.attention.base import PagedLayer
from engine.models.deltas import PackedLowRank, Spans
from engine.models.rope_table import RopeTable
from engine.ops import ActivationKind, NormVariant


class LayerTensors(NamedTuple):
    """One layer, in the order of csrc's list; None: the model has no such part. Products are what pack_linear or
    pack_linear_quant made."""

    input_norm: Tensor | None  # [hidden_size], as all norms but those of heads; twice as much for a layer norm
    norm_behind_attention: Tensor | None  # float32, as norm_behind_mlp: these norm float32 rows
    middle_norm: Tensor | None
    norm_behind_mlp: Tensor | None
    query_norm: Tensor | None  # [head_dim], or [num_query_heads * head_dim] where one norm spans all heads
    key_norm: Tensor | None  # likewise
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    gate_up: Tensor  # packed as gated, unless it has no gate
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


NUM_NORMS = 7  # the first six of LayerTensors, then the last norm


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """norms: (eps, variant) of the NUM_NORMS norms, the same in every layer; None where there is none.
    windows, ropes: one entry per layer, as in LayerRecipe. vocab_size: rows of the head. None for a scale or a cap:
    none."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    scale: float
    softcap: float | None
    embedding_scale: float | None
    residual_scale: float | None
    logits_scale: float | None
    logits_softcap: float | None
    activation: ActivationKind
    is_gated: bool
    is_parallel: bool
    norms: tuple[tuple[float, NormVariant] | None, ...]
    windows: tuple[int | None, ...]
    ropes: tuple[int | None, ...]


def _or_one(scale: float | None) -> float:
    return 1.0 if scale is None else scale


class NativeDecoder:
    """Shares the tensors it is given. One forward at a time; the interpreter's lock is free while it computes."""

    def __init__(
        self,
        shape: DecoderShape,
        embedding: Tensor,
        final_norm: Tensor,
        head: Tensor,
        layers: Sequence[LayerTensors],
        head_bias: Tensor | None = None,
    ) -> None:
        """embedding: [vocabulary, hidden_size], or packed as for ops.embed_quant, of as many rows as the head. Raises
        RuntimeError if shapes and tensors do not fit together."""
        self._none = none = final_norm.new_empty(0)
        norms: list[tuple[float, NormVariant]] = [norm or (0.0, "llama") for norm in shape.norms]
        self.handle = decoder_ops.create(
            [embedding, final_norm, head, none if head_bias is None else head_bias],
            [none if tensor is None else tensor for layer in layers for tensor in layer],
            sizes=(
                shape.num_query_heads,
                shape.num_kv_heads,
                shape.head_dim,
                shape.intermediate_size,
                shape.vocab_size,
            ),
            is_gated=shape.is_gated,
            is_parallel=shape.is_parallel,
            windows=[window or 0 for window in shape.windows],
            ropes=[-1 if rope is None else rope for rope in shape.ropes],
            scale=shape.scale,
            softcap=shape.softcap or 0.0,
            embedding_scale=_or_one(shape.embedding_scale),
            residual_scale=_or_one(shape.residual_scale),
            logits_scale=_or_one(shape.logits_scale),
            logits_softcap=shape.logits_softcap or 0.0,
            eps=[eps for eps, _ in norms],
            variants=[variant for _, variant in norms],
            activation=shape.activation,
        )
        weakref.finalize(self, decoder_ops.destroy, self.handle)
        self._attached: list[Tensor] = []

    def forward(
        self,
        input_ids: Tensor,  # [num_tokens], int64
        positions: Tensor,  # [num_tokens], int64
        logits_indices: Tensor | None,  # [num_rows], int64; None: the hidden states of all tokens are wanted
        layers: Sequence[PagedLayer],  # with caches and the step's metadata
        ropes: Sequence[RopeTable],
        spans: Spans = (),
    ) -> Tensor:
        """Logits [num_rows, vocab_size], float32, or hidden states [num_tokens, hidden_size] behind the last norm."""
        key_caches, value_caches = [], []
        for layer in layers:
            key_cache, value_cache, metadata = layer.attached()
            key_caches.append(key_cache)
            value_caches.append(value_cache)
        self._attach([tensor for rope in ropes for tensor in rope.rows()], key_caches, value_caches)
        return decoder_ops.forward(
            self.handle,
            input_ids,
            positions,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.slot_mapping,
            logits_indices,
            [number for span in spans for number in span],
        )

    def adapt(self, added: Sequence[PackedLowRank | None]) -> None:
        """One more adapter: per layer what it adds to the four products, in the order of LayerTensors."""
        pairs = [(self._none, self._none) if each is None else (each.a, each.b) for each in added]
        ranks = [0 if each is None else each.rank for each in added]
        decoder_ops.adapt(self.handle, [tensor for pair in pairs for tensor in pair], ranks)

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """See decoder_ops.step_bytes."""
        return decoder_ops.step_bytes(self.handle, num_tokens, num_rows)

    def _attach(self, ropes: list[Tensor], key_caches: list[Tensor], value_caches: list[Tensor]) -> None:
        """Tell csrc where tables and caches lie, if they are others than in the last forward."""
        wanted = [*ropes, *key_caches, *value_caches]
        if len(wanted) != len(self._attached) or not all(map(is_, wanted, self._attached)):
            self._attached = []  # whatever the call refuses leaves nothing attached
            decoder_ops.attach(self.handle, ropes, key_caches, value_caches)
            self._attached = wanted
