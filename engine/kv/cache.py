"""The KV tensors: one buffer, a slice of it per attention layer, views handed to the layers.

Knows bytes, not sequences. Layout contract (KERNELS.md section 6): per layer [num_blocks, block bytes], K then V
inside a block, each layer 256-byte aligned; what is inside a (block, head) is the attention backend's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine import ops
from engine.attention.base import PagedLayer
from engine.config import CacheConfig, StartError

ALIGNMENT = 256  # bytes


def bytes_per_token(layers: Sequence[PagedLayer], dtype: torch.dtype) -> int:
    """KV bytes that one token takes over all layers."""
    return sum(layer.spec.bytes_per_token(dtype) for layer in layers)


def num_blocks_for(config: CacheConfig, layers: Sequence[PagedLayer], dtype: torch.dtype, wanted_tokens: int) -> int:
    """Blocks of the pool.

    config.memory_bytes rules when given; else a share of the memory that is available now, but never more than
    `wanted_tokens` (what the configured number of sequences can use at full length). Raises StartError when not
    even two blocks fit."""
    per_block = config.block_size * bytes_per_token(layers, dtype)
    available = available_memory()
    budget = config.memory_bytes
    if budget is None:
        budget = int(available * config.memory_utilization)
        budget = min(budget, -(-wanted_tokens // config.block_size) * per_block)
    elif budget > available:
        raise StartError(
            f"The KV cache was asked to take {_size(budget)}, but only {_size(available)} of memory is available."
        )
    if budget // per_block < 2:
        raise StartError(
            f"Too little memory for the KV cache: {_size(budget)} hold less than two blocks of {_size(per_block)}."
        )
    return budget // per_block


def available_memory() -> int:
    """Bytes this process may still take: the machine's available memory, cut by its cgroup's limit."""
    limited = cgroup_available(Path("/sys/fs/cgroup"))
    available = _meminfo_available()
    return available if limited is None else min(available, limited)


def cgroup_available(root: Path) -> int | None:
    """Bytes below the limit of the control group mounted at `root` (version 2 or 1); None without a limit.

    Page cache that the kernel can drop counts as free, as kubelet and docker stats count it: reading the model's own
    files fills it up to the limit."""
    for limit_file, usage_file, stat_file, droppable in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit, usage = _read_int(root / limit_file), _read_int(root / usage_file)
        if limit is not None and usage is not None:
            return max(0, limit - max(0, usage - _read_stat(root / stat_file, droppable)))
    return None


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 8 << 30  # no /proc (macOS): a careful guess, overridden by --kv-cache-memory


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


class KVCache:
    """Owns the pool; `layers` get their key_cache and value_cache views at construction.

    Memory is reserved, not touched: resident size grows as blocks are first written."""

    def __init__(self, layers: Sequence[PagedLayer], num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        block_bytes = [block_size * layer.spec.bytes_per_token(dtype) for layer in layers]
        spans = [-(-num_blocks * size // ALIGNMENT) * ALIGNMENT for size in block_bytes]
        try:
            raw = torch.empty(sum(spans) + ALIGNMENT, dtype=torch.uint8)
        except RuntimeError as error:
            raise StartError(f"The KV cache of {_size(sum(spans))} could not be allocated.") from error
        offset = -raw.data_ptr() % ALIGNMENT
        self.num_bytes = sum(spans)
        self.buffers: list[Tensor] = []  # per layer [num_blocks, block bytes], uint8
        for layer, size, span in zip(layers, block_bytes, spans, strict=True):
            buffer = raw[offset : offset + num_blocks * size].view(num_blocks, size)
            self.buffers.append(buffer)
            _attach(layer, buffer, block_size, dtype)
            offset += span

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
