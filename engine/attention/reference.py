"""The oracle: paged attention in plain torch, one sequence at a time, in float64.

Slow on purpose. Inside a (block, head) it stores rows in their natural order, so its caches and those of another
backend cannot be exchanged. Slots that hold no key may contain anything, NaN included: they are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata, PagedLayer


class ReferenceAttention:
    """Runs on any device and dtype."""

    name = "reference"

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
        """See AttentionBackend.forward."""
        self.write(key, value, layer)
        return self.attend(
            query, key, value, layer, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
        )

    def write(self, key: Tensor, value: Tensor, layer: PagedLayer) -> None:
        """See AttentionBackend.write."""
        key_cache, value_cache, metadata = layer.attached()
        write(key, key_cache, metadata.slot_mapping)
        write(value, value_cache, metadata.slot_mapping)

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
        """See AttentionBackend.attend."""
        key_cache, value_cache, metadata = layer.attached()
        out = query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        starts = metadata.query_start_loc.tolist()
        for sequence, seq_len in enumerate(metadata.seq_lens.tolist()):
            begin, end = starts[sequence], starts[sequence + 1]
            if begin == end or seq_len == 0:
                continue
            positions = torch.arange(seq_len - (end - begin), seq_len, device=query.device)
            first = first_key(positions[:1].clamp(min=0), window, chunk)[0].item()
            keys = read(key_cache, metadata, sequence, int(first), seq_len)
            values = read(value_cache, metadata, sequence, int(first), seq_len)
            visible = visible_mask(positions, int(first), seq_len, window, chunk)
            out[begin:end] = attend(query[begin:end], keys, values, visible, scale, softcap, sinks).to(out.dtype)
        return out


def write(rows: Tensor, cache: Tensor, slot_mapping: Tensor) -> None:
    """rows [num_tokens, heads, dim] into cache [num_blocks, heads, block_size, dim]; negative slots are skipped."""
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    block_size = cache.shape[2]
    cache[slots // block_size, :, slots % block_size] = rows[kept]


def read(cache: Tensor, metadata: AttentionMetadata, sequence: int, begin: int, end: int) -> Tensor:
    """Rows of positions [begin, end) of one sequence: [end - begin, heads, dim], float64."""
    positions = torch.arange(begin, end, device=cache.device)
    block_size = cache.shape[2]
    blocks = metadata.block_tables[sequence, positions // block_size].long()
    return cache[blocks, :, positions % block_size].double()


def first_key(positions: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """The first position each query sees, before causality."""
    first = torch.zeros_like(positions)
    if window is not None:
        first = torch.maximum(first, positions - window + 1)
    if chunk is not None:
        first = torch.maximum(first, positions // chunk * chunk)
    return first


def visible_mask(positions: Tensor, begin: int, end: int, window: int | None, chunk: int | None) -> Tensor:
    """[num_queries, end - begin], bool: causal, within the window and the chunk."""
    keys = torch.arange(begin, end, device=positions.device)
    first = first_key(positions, window, chunk)
    return (keys <= positions[:, None]) & (keys >= first[:, None])


def attend(
    query: Tensor,  # [num_queries, num_query_heads, key_dim]
    keys: Tensor,  # [num_keys, num_kv_heads, key_dim], float64
    values: Tensor,  # [num_keys, num_kv_heads, value_dim], float64
    visible: Tensor,  # [num_queries, num_keys], bool
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[num_queries, num_query_heads, value_dim], float64; zeros for a query that sees no key."""
    group = query.shape[1] // keys.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys.repeat_interleave(group, dim=1)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
        scores = torch.cat([scores, column], dim=2)
    weights = torch.softmax(scores, dim=2)[:, :, : keys.shape[0]]
    weights = weights.masked_fill(~visible, 0.0)  # a row without keys: softmax of nothing is NaN
    return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, dim=1))
