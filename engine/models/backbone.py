"""`Backbone`: a loaded model, computing one ragged batch over the paged cache.

Knows tensors and layers, not sequences or files, and not how the model computes: that is a `Computation`, either
transformers' own modules (`tree.py`) or the fused decoder (`fused.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata, PagedLayer
from engine.models.deltas import Site, Spans


class Computation(Protocol):
    """layers: one per attention call of a forward, in call order. tells_hidden_states: False if the model cannot be
    cut into two halves, so that `hidden_states` and `logits` must not be called. quantization: see ModelInfo.
    weight_bytes: memory that the weights take, adapters included. is_capturable: a forward launches the same kernels
    for every batch of the same shape and asks the device nothing, so that it may be recorded and replayed."""

    layers: tuple[PagedLayer, ...]
    vocab_size: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device
    is_capturable: bool

    @property
    def tells_hidden_states(self) -> bool: ...

    @property
    def quantization(self) -> str: ...

    @property
    def weight_bytes(self) -> int: ...

    def cover(self, num_positions: int) -> None:
        """Before a forward: positions [0, num_positions) may occur."""
        ...

    def step_bytes(self, num_tokens: int, num_rows: int) -> int:
        """Memory for activations and logits in a step of so many tokens and rows of logits, as far as it is known."""
        ...

    def adapter_sites(self) -> list[Site]:
        """The products that adapters may add to."""
        ...

    def finish_adapters(self, num_adapters: int) -> None:
        """When all sites have taken theirs. Raises StartError if one changes what it cannot."""
        ...

    def compute(self, input_ids: Tensor, positions: Tensor, logits_indices: Tensor, spans: Spans = ()) -> Tensor:
        """As Backbone.forward, every layer's metadata being set."""
        ...

    def hidden_states(self, input_ids: Tensor, positions: Tensor, spans: Spans = ()) -> Tensor:
        """As Backbone.hidden_states, every layer's metadata being set."""
        ...

    def logits(self, hidden_states: Tensor) -> Tensor:
        """As Backbone.logits."""
        ...


class Backbone:
    """`forward` is not reentrant; one engine thread calls it.

    layers: the KV cache attaches its views to them. batch_invariant: no row's result depends on its neighbours.
    tells_hidden_states: False for a rare model that only knows `forward`. quantization: see ModelInfo.
    weight_bytes: memory that the weights take, adapters included. device: of the weights, and of every tensor that
    goes in and comes out. is_capturable: see Computation."""

    def __init__(self, model: Computation, *, batch_invariant: bool, num_parameters: int) -> None:
        self.model = model
        self.layers = model.layers
        self.vocab_size = model.vocab_size
        self.hidden_size = model.hidden_size
        self.dtype = model.dtype
        self.device = model.device
        self.is_capturable = model.is_capturable
        self.tells_hidden_states = model.tells_hidden_states
        self.quantization = model.quantization
        self.num_parameters = num_parameters
        self.num_adapters = 0  # that the model has taken
        self.batch_invariant = batch_invariant

    @property
    def weight_bytes(self) -> int:
        return self.model.weight_bytes

    def forward(
        self,
        input_ids: Tensor,  # [num_tokens], int64
        positions: Tensor,  # [num_tokens], int64
        metadata: AttentionMetadata,
        logits_indices: Tensor,  # [num_rows], int64: which tokens' logits are wanted; may be empty
        spans: Spans = (),  # of tokens with an adapter
    ) -> Tensor:
        """Logits [num_rows, vocab_size], float32. K and V of every token are written as a side effect."""
        with self._attending(metadata):
            return self.model.compute(input_ids, positions, logits_indices, spans)

    def hidden_states(
        self,
        input_ids: Tensor,  # [num_tokens], int64
        positions: Tensor,  # [num_tokens], int64
        metadata: AttentionMetadata,
        spans: Spans = (),
    ) -> Tensor:
        """What the head sees: [num_tokens, hidden_size] in the model's dtype, behind the last norm. K and V of every
        token are written as a side effect; `logits` of some of them equals what `forward` makes of these."""
        with self._attending(metadata):
            return self.model.hidden_states(input_ids, positions, spans)

    @torch.inference_mode()
    def logits(self, hidden_states: Tensor) -> Tensor:
        """Logits [num_rows, vocab_size], float32, of hidden states [num_rows, hidden_size]."""
        return self.model.logits(hidden_states)

    @contextmanager
    def _attending(self, metadata: AttentionMetadata) -> Iterator[None]:
        if not torch.is_inference_mode_enabled():  # a runner is in it, and it is not free
            with torch.inference_mode(), self._attending(metadata):
                yield
            return
        self.model.cover(metadata.max_seq_len)
        for layer in self.layers:
            layer.metadata = metadata
        try:
            yield
        finally:
            for layer in self.layers:
                layer.metadata = None
