"""Typed wrappers over `torch.ops.pagemill`, the compiled ops of csrc/: the only file that touches torch.ops.

Every op checks its arguments and raises RuntimeError with a message that names the op, the argument, what was
wanted and what came. Tensors live on the CPU and are float32 or bfloat16 unless said otherwise. In every op the
order in which one output row is accumulated depends on that row alone, so its bits do not change with the other
rows or the number of threads.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor


def library_candidates() -> list[Path]:
    """Where a built `_C.so` may lie: beside this file, in site-packages (editable install), in build/ (inner loop)."""
    here = Path(__file__).resolve().parent
    places = [here / "_C.so", Path(sysconfig.get_path("platlib")) / "engine" / "_C.so"]
    return [p for p in [*places, *sorted((here.parent / "build").glob("*/_C.so"))] if p.is_file()]


def _load() -> Path:
    """Load the newest candidate. Raises ImportError with one sentence if there is none."""
    found = library_candidates()
    if not found:
        raise ImportError("The compiled ops are missing: run `make setup` (or `pip install -e .`) to build csrc/.")
    newest = max(found, key=lambda p: p.stat().st_mtime_ns)
    torch.ops.load_library(str(newest))
    return newest


LIBRARY = _load()
_ops = torch.ops.pagemill


# ---- instruction-set level ------------------------------------------------------------------------------------


def isa() -> str:
    """The active level: "portable", "avx2", "avx512", "amx" (or "amx_emulated", which only tests choose)."""
    return str(_ops.isa())


def isa_levels() -> tuple[str, ...]:
    """The levels this machine and this build have, worst to best, then those that only tests choose."""
    return tuple(_ops.isa_levels().split(","))


def set_isa(name: str) -> None:
    """Pin the level for this process ("auto": the best). To be called before weights are packed or caches filled."""
    _ops.set_isa(name)


# ---- paged KV cache -------------------------------------------------------------------------------------------


def reshape_and_cache(
    key: Tensor,  # [num_tokens, num_kv_heads, key_dim]; the last dimension contiguous
    value: Tensor,  # [num_tokens, num_kv_heads, value_dim]; likewise
    key_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, key_dim]; blocks contiguous, free stride between
    value_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, value_dim]; likewise
    slot_mapping: Tensor,  # [num_tokens], int64: block_id * block_size + offset; negative: skip
) -> None:
    """Write K and V rows into the cache. One dtype for all but slot_mapping; in bfloat16 key_dim must be even.

    The order of elements inside a (block, head) is private to csrc (csrc/cpu/cache.h)."""
    _ops.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


# ---- linear layers --------------------------------------------------------------------------------------------


def pack_linear(weight: Tensor) -> Tensor:
    """The weight [out_features, in_features] (float32 or bfloat16) in the order `linear` reads: panels of 32 output
    features, zero-padded. Packed once at load; the layout is the same at every instruction-set level."""
    packed: Tensor = _ops.pack_linear(weight)
    return packed


def linear(
    x: Tensor,  # [M, in_features] in the weight's dtype; the last dimension contiguous, rows at any stride
    packed: Tensor,  # from pack_linear
    bias: Tensor | None,  # [out_features], float32 or bfloat16
    out_features: int,
    *,
    out_dtype: torch.dtype | None = None,  # float32, or the dtype of x (None)
) -> Tensor:  # [M, out_features]
    """x @ weight.T + bias, accumulated in float32 in ascending order of in_features, rounded once.

    A row's bits do not depend on the other rows, their number, or the number of threads."""
    if out_dtype not in (None, torch.float32, x.dtype):
        raise RuntimeError(f"pagemill.linear: out_dtype: wanted torch.float32 or {x.dtype}, got {out_dtype}")
    out: Tensor = _ops.linear(x, packed, bias, out_features, out_dtype is torch.float32)
    return out
