"""Attention over paged KV: what a step knows about its sequences, what a layer owns, what a backend can do.

Knows nothing of schedulers or models. One `AttentionMetadata` is built per step and used by every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HostLengths:
    """What a backend needs that chooses its kernels by the lengths, where the tensors lie on a device."""

    query_lens: npt.NDArray[np.int32]  # [num_seqs]
    seq_lens: npt.NDArray[np.int32]  # [num_seqs]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One ragged batch of prompt chunks and decodes.

    Query i of sequence s stands at absolute position seq_lens[s] - query_len + i and sees keys up to itself.
    Entries of block_tables past a sequence's length may be -1. max_query_len and max_seq_len are bounds: of a step
    that is captured once and run for other batches, nothing in those may be longer."""

    block_tables: Tensor  # [num_seqs, max_blocks], int32
    query_start_loc: Tensor  # [num_seqs + 1], int32: offsets of each sequence's queries in the flat batch
    seq_lens: Tensor  # [num_seqs], int32: keys visible to the last query, itself included
    slot_mapping: Tensor  # [num_tokens], int64: block_id * block_size + offset; negative: do not write
    max_query_len: int
    max_seq_len: int
    host: HostLengths | None = None  # None: not known, or other ones when a captured step runs again


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one attention call of a model stores per token, and how it looks back."""

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None  # tokens a query sees, itself included; None: all
    chunk: int | None = None  # attention within absolute chunks of this length; None: no chunks
    softcap: float | None = None
    has_sinks: bool = False

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


@dataclass(slots=True)
class PagedLayer:
    """One attention call of the model: its cache views and the metadata of the step in progress.

    Hangs on the attention module as `module.paged_layer`; owned by one engine. The views share one buffer per
    layer, K then V inside each block (engine/kv/cache.py); what is inside a (block, head) is the backend's private
    business."""

    index: int
    spec: LayerSpec
    key_cache: Tensor | None = None  # [num_blocks, num_kv_heads, block_size, key_dim], strided over blocks
    value_cache: Tensor | None = None  # [num_blocks, num_kv_heads, block_size, value_dim], strided over blocks
    metadata: AttentionMetadata | None = None

    def attached(self) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Both caches and the metadata. Raises RuntimeError outside a step: that is a bug of ours."""
        if self.key_cache is None or self.value_cache is None or self.metadata is None:
            raise RuntimeError(f"Attention layer {self.index} ran outside a step: no cache or no metadata attached.")
        return self.key_cache, self.value_cache, self.metadata


class AttentionBackend(Protocol):
    """One interface, several equals: `reference` (pure torch oracle), `native` (csrc) and the libraries of `flash`."""

    name: str

    def forward(
        self,
        query: Tensor,  # [num_tokens, num_query_heads, key_dim]
        key: Tensor,  # [num_tokens, num_kv_heads, key_dim]
        value: Tensor,  # [num_tokens, num_kv_heads, value_dim]
        layer: PagedLayer,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,  # [num_query_heads]
    ) -> Tensor:
        """`write`, then `attend`.

        Returns [num_tokens, num_query_heads, value_dim] in query's dtype."""
        ...

    def write(self, key: Tensor, value: Tensor, layer: PagedLayer) -> None:
        """Key and value into the cache, through layer.metadata.slot_mapping."""
        ...

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: PagedLayer,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attention over the block tables, key and value of this step being in the cache."""
        ...
