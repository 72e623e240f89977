"""Attention over prompts by a library: flash-attn, or the kernels that torch brings along.

Single tokens stay with the native kernels, prompts go one of three ways: a prompt without a cached beginning over its
own fresh keys and values; one with a beginning over the cache where the library reads blocks of this size, else over a
copy of its keys and values. The ways round differently, and which one a token takes depends on what is cached and how
its prompt is cut: so with a library answers may depend on batch and cache state, and nothing here claims otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionMetadata, HostLengths, PagedLayer
from engine.attention.libraries import Lengths, Library


@dataclass(frozen=True, slots=True)
class _Part:
    """Some sequences of a step. tokens: their places in the flat batch, None: all of it."""

    tokens: Tensor | None  # [num_queries], int64
    block_tables: Tensor  # [num_seqs, max_blocks], int32
    lengths: Lengths
    num_keys: int

    def of(self, flat: Tensor) -> Tensor:
        return flat if self.tokens is None else flat[self.tokens]

    def put(self, rows: Tensor, flat: Tensor) -> None:
        """The reverse of `of`."""
        if self.tokens is None:
            flat[: len(rows)] = rows
        else:
            flat[self.tokens] = rows

    def metadata(self) -> AttentionMetadata:
        """For a backend that reads the cache."""
        lengths = self.lengths
        return AttentionMetadata(
            block_tables=self.block_tables,
            query_start_loc=lengths.query_start_loc,
            seq_lens=lengths.seq_lens,
            slot_mapping=lengths.seq_lens.new_empty(0, dtype=torch.int64),  # nothing is written
            max_query_len=lengths.max_query_len,
            max_seq_len=lengths.max_seq_len,
        )

    def places(self, block_size: int) -> tuple[Tensor, Tensor]:
        """(block, place in the block) of every key, sequence by sequence: [num_keys], int64."""
        lengths = self.lengths
        sequences = torch.arange(len(lengths.seq_lens), device=lengths.seq_lens.device)
        owner = torch.repeat_interleave(sequences, lengths.seq_lens.long(), output_size=self.num_keys)
        positions = torch.arange(self.num_keys, device=owner.device) - lengths.key_start_loc[owner]
        blocks = self.block_tables[owner, positions // block_size].long().clamp(min=0)
        return blocks, positions % block_size


@dataclass(frozen=True, slots=True)
class _Plan:
    """A step's sequences by the way they go; None: there are none of these."""

    single: _Part | None  # one query each
    fresh: _Part | None  # nothing of them is cached
    continued: _Part | None

    @staticmethod
    def of(metadata: AttentionMetadata, host: HostLengths) -> _Plan:
        is_single = host.query_lens == 1
        is_fresh = ~is_single & (host.query_lens == host.seq_lens)
        masks = (is_single, is_fresh, ~is_single & ~is_fresh)
        return _Plan(*(_part(metadata, host, np.flatnonzero(mask)) for mask in masks))


def _part(metadata: AttentionMetadata, host: HostLengths, which: npt.NDArray[np.int64]) -> _Part | None:
    if not len(which):
        return None
    device = metadata.seq_lens.device
    query_lens, seq_lens = host.query_lens[which], host.seq_lens[which]
    query_starts, key_starts = (np.concatenate([[0], np.cumsum(lens)]) for lens in (query_lens, seq_lens))
    block_tables, tokens = metadata.block_tables, None
    if len(which) < len(host.query_lens):
        begins = np.concatenate([[0], np.cumsum(host.query_lens)])[which]
        flat = np.arange(query_starts[-1]) + np.repeat(begins - query_starts[:-1], query_lens)
        tokens = _sent(flat, torch.int64, device)
        block_tables = block_tables[_sent(which, torch.int64, device)]
    lengths = Lengths(
        _sent(query_starts, torch.int32, device),
        _sent(key_starts, torch.int32, device),
        _sent(seq_lens, torch.int32, device),
        int(query_lens.max()),
        int(seq_lens.max()),
    )
    return _Part(tokens, block_tables, lengths, int(key_starts[-1]))


def _sent(numbers: npt.NDArray[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    host = torch.from_numpy(numbers).to(dtype)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class LibraryAttention:
    """base: writes the cache, and attends where the library does not."""

    def __init__(self, library: Library, base: AttentionBackend) -> None:
        self.name = library.name
        self._library, self._base = library, base
        self._planned: tuple[AttentionMetadata, _Plan] | None = None
        self._places: tuple[_Part, tuple[Tensor, Tensor]] | None = None

    def forward(
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
        """See AttentionBackend.forward."""
        self.write(key, value, layer)
        return self.attend(
            query, key, value, layer, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
        )

    def write(self, key: Tensor, value: Tensor, layer: PagedLayer) -> None:
        """See AttentionBackend.write."""
        self._base.write(key, value, layer)

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
        _, value_cache, metadata = layer.attached()
        is_served = chunk is None and sinks is None and self._library.serves(layer.spec, scale)
        if not is_served or metadata.host is None or metadata.max_query_len == 1:
            return self._base.attend(
                query, key, value, layer, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
            )
        plan = self._plan(metadata, metadata.host)
        out = query.new_zeros((query.shape[0], query.shape[1], value_cache.shape[3]))
        if (part := plan.single) is not None:
            single = replace(layer, metadata=part.metadata())
            rows = self._base.attend(
                part.of(query), part.of(key), part.of(value), single, scale=scale, window=window, softcap=softcap
            )
            part.put(rows, out)
        if (part := plan.fresh) is not None:
            rows = self._library.attend(
                part.of(query), part.of(key), part.of(value), part.lengths, scale=scale, window=window,
                softcap=softcap,
            )  # fmt: skip
            part.put(rows, out)
        if (part := plan.continued) is not None:
            part.put(self._continue(part, part.of(query), layer, scale, window, softcap), out)
        return out

    def _continue(
        self, part: _Part, query: Tensor, layer: PagedLayer, scale: float, window: int | None, softcap: float | None
    ) -> Tensor:
        """Over what is cached, this step's keys included."""
        caches = layer.attached()[:2]
        block_size = caches[0].shape[2]
        if self._library.reads_blocks(block_size):
            key, value = (cache.permute(0, 2, 1, 3) for cache in caches)
            tables: Tensor | None = part.block_tables
        else:
            blocks, inside = self._places_of(part, block_size)
            key, value = (cache[blocks, :, inside] for cache in caches)
            tables = None
        return self._library.attend(
            query, key, value, part.lengths, scale=scale, window=window, softcap=softcap, block_tables=tables
        )

    def _plan(self, metadata: AttentionMetadata, host: HostLengths) -> _Plan:
        """Made by the first layer of a step, kept for the others."""
        if self._planned is None or self._planned[0] is not metadata:
            self._planned = metadata, _Plan.of(metadata, host)
        return self._planned[1]

    def _places_of(self, part: _Part, block_size: int) -> tuple[Tensor, Tensor]:
        if self._places is None or self._places[0] is not part:
            self._places = part, part.places(block_size)
        return self._places[1]
