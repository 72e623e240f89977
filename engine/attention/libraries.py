"""The libraries that `flash.py` calls for prompts: flash-attn, and the kernels that torch brings along.

Neither is imported before it is asked for: one may not be there, the other takes a second.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor

from engine.attention.base import LayerSpec
from engine.config import StartError

PAGE = 256  # tokens: blocks of the FlashAttention 2 kernels are a multiple of it
MAX_DIM = 256  # of a head, in the same kernels


class Lengths(NamedTuple):
    """Of the sequences in one call."""

    query_start_loc: Tensor  # [num_seqs + 1], int32, from 0
    key_start_loc: Tensor  # [num_seqs + 1], int32, from 0
    seq_lens: Tensor  # [num_seqs], int32: keys of each
    max_query_len: int
    max_seq_len: int


class Library(Protocol):
    """Causal attention whose last query sees the last key."""

    name: str

    def serves(self, spec: LayerSpec, scale: float) -> bool: ...

    def reads_blocks(self, block_size: int) -> bool: ...

    def attend(
        self,
        query: Tensor,  # [num_queries, num_query_heads, dim]
        key: Tensor,  # [num_keys, num_kv_heads, dim], or of blocks [num_blocks, block_size, num_kv_heads, dim]
        value: Tensor,  # likewise
        lengths: Lengths,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        block_tables: Tensor | None = None,  # [num_seqs, max_blocks], int32
    ) -> Tensor: ...  # [num_queries, num_query_heads, dim]


def _is_fitting(spec: LayerSpec) -> bool:
    return spec.key_dim == spec.value_dim <= MAX_DIM and spec.key_dim % 8 == 0


def _window(window: int | None) -> tuple[int, int]:
    """Tokens to the left and right of a query's own place; -1: all."""
    return (-1 if window is None else window - 1, 0)


class FlashAttention:
    """The package flash-attn, version 2."""

    name = "flash-attn"

    def __init__(self, varlen: Callable[..., Any]) -> None:
        """varlen: flash_attn.flash_attn_varlen_func."""
        self._varlen = varlen

    def serves(self, spec: LayerSpec, scale: float) -> bool:
        return _is_fitting(spec)

    def reads_blocks(self, block_size: int) -> bool:
        return block_size % PAGE == 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Lengths,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        block_tables: Tensor | None = None,
    ) -> Tensor:
        """See Library.attend."""
        out = self._varlen(
            query, key, value, lengths.query_start_loc, lengths.key_start_loc, lengths.max_query_len,
            lengths.max_seq_len, softmax_scale=scale, causal=True, window_size=_window(window), softcap=softcap or 0.0,
            block_table=block_tables,
        )  # fmt: skip
        return cast(Tensor, out)


class TorchVarlen:
    """torch.nn.attention.varlen, as far as this torch's own has grown: windows, scales, and later blocks."""

    name = "torch-varlen"

    def __init__(self, varlen: Callable[..., Any]) -> None:
        """varlen: torch.nn.attention.varlen.varlen_attn."""
        self._varlen = varlen
        self._options = frozenset(inspect.signature(varlen).parameters)

    def serves(self, spec: LayerSpec, scale: float) -> bool:
        is_plain = spec.window is None or "window_size" in self._options
        is_scaled = "scale" in self._options or abs(scale * spec.key_dim**0.5 - 1) < 1e-6
        return _is_fitting(spec) and spec.softcap is None and is_plain and is_scaled

    def reads_blocks(self, block_size: int) -> bool:
        return block_size % PAGE == 0 and {"block_table", "seqused_k"} <= self._options

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Lengths,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        block_tables: Tensor | None = None,
    ) -> Tensor:
        """See Library.attend."""
        wanted: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[-2]}
        wanted |= {"window_size": _window(window)} if "window_size" in self._options else {"is_causal": True}
        key_starts: Tensor | None = lengths.key_start_loc
        if block_tables is not None:
            key_starts = None
            wanted |= {"block_table": block_tables, "seqused_k": lengths.seq_lens}
        options = {name: value for name, value in wanted.items() if name in self._options}
        out = self._varlen(
            query,
            key,
            value,
            lengths.query_start_loc,
            key_starts,
            lengths.max_query_len,
            lengths.max_seq_len,
            **options,
        )
        return cast(Tensor, out)


def flash_attention() -> FlashAttention:
    """Raises StartError if the package is not here."""
    try:
        from flash_attn import flash_attn_varlen_func  # optional: built from source, for hours
    except ImportError as error:
        raise StartError(
            "--attention-backend flash-attn needs the package flash-attn, which cannot be imported here "
            f"({str(error).splitlines()[0]}); native and torch-varlen need nothing."
        ) from error
    return FlashAttention(flash_attn_varlen_func)


def torch_varlen() -> TorchVarlen:
    return TorchVarlen(importlib.import_module("torch.nn.attention.varlen").varlen_attn)
