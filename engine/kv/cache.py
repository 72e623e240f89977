"""The KV tensors: one buffer, a slice of it per attention layer, views handed to the layers.

Knows bytes, not sequences. Layout contract: per layer [num_blocks, block bytes], K then V inside a block, each layer
256-byte aligned; what is inside a (block, head) is the attention backend's business.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine import ops
from engine.attention.base import PagedLayer
from engine.config import CacheConfig, StartError
from engine.device import HOST
from engine.memory import available_memory, size_text

ALIGNMENT = 256  # bytes


def bytes_per_token(layers: Sequence[PagedLayer], dtype: torch.dtype) -> int:
    """KV bytes that one token takes over all layers."""
    return sum(layer.spec.bytes_per_token(dtype) for layer in layers)


def num_blocks_for(
    config: CacheConfig, layers: Sequence[PagedLayer], dtype: torch.dtype, wanted_tokens: int, step_bytes: int = 0
) -> int:
    """Blocks of the pool. step_bytes: what a step will take and has not taken yet; the pool leaves it free.

    config.memory_bytes rules when given; else a share of the memory that is available now, but never more than
    `wanted_tokens` (what the configured number of sequences can use at full length). Raises StartError when not
    even two blocks fit."""
    per_block = config.block_size * bytes_per_token(layers, dtype)
    available = max(0, available_memory() - step_bytes)
    budget = config.memory_bytes
    if budget is None:
        budget = int(available * config.memory_utilization)
        budget = min(budget, -(-wanted_tokens // config.block_size) * per_block)
    elif budget > available:
        raise StartError(
            f"The KV cache was asked to take {size_text(budget)}, but only {size_text(available)} of memory "
            "is available."
        )
    if budget // per_block < 2:
        raise StartError(
            f"Too little memory for the KV cache: {size_text(budget)} hold less than two blocks of "
            f"{size_text(per_block)}."
        )
    return budget // per_block


class KVCache:
    """Owns the pool; `layers` get their key_cache and value_cache views at construction.

    On the CPU memory is reserved, not touched: resident size grows as blocks are first written."""

    def __init__(
        self,
        layers: Sequence[PagedLayer],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device = HOST,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        block_bytes = [block_size * layer.spec.bytes_per_token(dtype) for layer in layers]
        spans = [-(-num_blocks * size // ALIGNMENT) * ALIGNMENT for size in block_bytes]
        try:
            raw = torch.empty(sum(spans) + ALIGNMENT, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise StartError(f"The KV cache of {size_text(sum(spans))} could not be allocated.") from error
        offset = -raw.data_ptr() % ALIGNMENT
        self.num_bytes = sum(spans)
        self.buffers: list[Tensor] = []  # per layer [num_blocks, block bytes], uint8
        for layer, size, span in zip(layers, block_bytes, spans, strict=True):
            buffer = raw[offset : offset + num_blocks * size].view(num_blocks, size)
            self.buffers.append(buffer)
            _attach(layer, buffer, block_size, dtype)
            offset += span

    def detach(self, layers: Sequence[PagedLayer]) -> None:
        """Give the layers back without a cache, so that the pool's memory can go."""
        for layer in layers:
            layer.key_cache = layer.value_cache = None
        self.buffers = []

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks (source, destination) in every layer; the sets must be disjoint."""
        if pairs:
            ops.copy_blocks(self.buffers, torch.tensor(pairs, dtype=torch.int64))


def _attach(layer: PagedLayer, buffer: Tensor, block_size: int, dtype: torch.dtype) -> None:
    spec, num_blocks = layer.spec, buffer.shape[0]
    elements = buffer.view(dtype)  # [num_blocks, block elements]
    split = spec.num_kv_heads * block_size * spec.key_dim
    layer.key_cache = elements[:, :split].view(num_blocks, spec.num_kv_heads, block_size, spec.key_dim)
    layer.value_cache = elements[:, split:].view(num_blocks, spec.num_kv_heads, block_size, spec.value_dim)
