"""Attention through csrc: two calls per layer, bit-identical for a row whatever it is batched with."""

from __future__ import annotations

import torch
from torch import Tensor

from engine import device_ops, ops
from engine.attention.base import AttentionMetadata, PagedLayer


class NativeAttention:
    """On the CPU float32 and bfloat16, on a CUDA device bfloat16 and float16; the layout inside a (block, head) is
    csrc/cpu/cache.h's, and rows of key_dim numbers on CUDA."""

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
        self.write(key, value, layer)
        return self.attend(
            query, key, value, layer, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
        )

    def write(self, key: Tensor, value: Tensor, layer: PagedLayer) -> None:
        """See AttentionBackend.write."""
        key_cache, value_cache, metadata = layer.attached()
        dtype = key_cache.dtype
        ops.reshape_and_cache(
            _rows(key, dtype), _rows(value, dtype), key_cache, value_cache, metadata.slot_mapping
        )  # fmt: skip

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
        rows = _rows(query, key_cache.dtype)
        out = rows.new_empty((rows.shape[0], rows.shape[1], value_cache.shape[3]))
        sinks = None if sinks is None else sinks.detach().to(torch.float32).contiguous()
        if query.is_cuda:
            _on_device(out, rows, layer, scale, window, chunk, softcap, sinks)
        else:
            ops.paged_attention(
                rows, key_cache, value_cache, metadata.block_tables, metadata.query_start_loc, metadata.seq_lens,
                scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks, out=out,
            )  # fmt: skip
        return out.to(query.dtype)


def _on_device(
    out: Tensor,
    query: Tensor,
    layer: PagedLayer,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> None:
    """With the bounds that the host knows, so that a step of single tokens takes the kernel for those and nothing
    waits for the device."""
    key_cache, value_cache, metadata = layer.attached()
    device_ops.paged_attention_into(
        out, query, key_cache, value_cache, metadata.block_tables, metadata.query_start_loc, metadata.seq_lens,
        _workspace(query, value_cache, metadata), scale=scale, max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len, window=window, chunk=chunk, softcap=softcap, sinks=sinks,
    )  # fmt: skip


def _workspace(query: Tensor, value_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """From torch's pool, where the next layer finds it again."""
    num_bytes = device_ops.paged_attention_workspace(
        metadata.seq_lens.shape[0], metadata.max_query_len, metadata.max_seq_len, query.shape[1],
        value_cache.shape[1], value_cache.shape[3],
    )  # fmt: skip
    return query.new_empty(num_bytes, dtype=torch.uint8)


def _rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """In the cache's dtype, a row's elements side by side; usually the tensor itself."""
    rows = rows.to(dtype)
    return rows if rows.stride(-1) == 1 else rows.contiguous()
