"""Attention through csrc: two calls per layer, bit-identical for a row whatever it is batched with."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import ops
from engine.attention.base import PagedLayer


class NativeAttention:
    """float32 and bfloat16 on the CPU; the layout inside a (block, head) is csrc/cpu/cache.h's."""

    name = "native"

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
        """See AttentionBackend.forward. Rows past the metadata's last sequence come back as zeros."""
        key_cache, value_cache, metadata = layer.attached()
        dtype = key_cache.dtype
        ops.reshape_and_cache(
            _rows(key, dtype), _rows(value, dtype), key_cache, value_cache, metadata.slot_mapping
        )  # fmt: skip
        out = ops.paged_attention(
            _rows(query, dtype),
            key_cache,
            value_cache,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=scale,
            window=window,
            chunk=chunk,
            softcap=softcap,
            sinks=None if sinks is None else sinks.detach().to(torch.float32).contiguous(),
        )
        return out.to(query.dtype)


def _rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """In the cache's dtype, a row's elements side by side; usually the tensor itself."""
    rows = rows.to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
