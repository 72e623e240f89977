"""From a `ScheduledBatch` to tensors: the per-row host state and the flat batch of one forward.

Knows rows, tokens and block tables; knows no model and no sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, groupby
from operator import add
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.batch import ScheduledBatch
from engine.models.deltas import AdapterSpan, Spans

Int32Array = npt.NDArray[np.int32]


class RowTable:
    """Token ids and block table of every row, updated by the deltas of each batch."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # zeros, not empty: the pages of rows never used are never touched
        self.token_ids: Int32Array = np.zeros((num_rows, max_model_len + 1), dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(num_rows, dtype=np.int32)
        self.adapters: Int32Array = np.zeros(num_rows, dtype=np.int32)  # as NewRow.adapter
        self.has_adapters = False  # ever had one in a row
        max_blocks = -(-(max_model_len + 1) // block_size)
        self.block_table: Int32Array = np.full((num_rows, max_blocks), -1, dtype=np.int32)

    def apply(self, batch: ScheduledBatch) -> None:
        """freed_rows, new_rows, new_tokens, new_blocks, in that order."""
        for row in batch.freed_rows:
            self.block_table[row] = -1
        for new in batch.new_rows:
            self.token_ids[new.row, : len(new.token_ids)] = new.token_ids
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
            self.adapters[new.row] = new.adapter
            self.has_adapters |= new.adapter > 0
            self.block_table[new.row] = -1
            self.block_table[new.row, : len(new.block_tables[0])] = new.block_tables[0]
        for tokens in batch.new_tokens:
            self.token_ids[tokens.row, tokens.start : tokens.start + len(tokens.token_ids)] = tokens.token_ids
        for blocks in batch.new_blocks:
            self.block_table[blocks.row, blocks.start : blocks.start + len(blocks.block_ids)] = blocks.block_ids

    def blocks_of(self, rows: Sequence[int], num_tokens: int) -> Tensor:
        """[len(rows), blocks of so many tokens], int32. Put together as bytes: see tokens_of."""
        width, (step, size) = -(-num_tokens // self.block_size), self.block_table.strides
        memory = self.block_table.data.cast("B")
        joined = bytearray().join([memory[row * step : row * step + width * size] for row in rows])
        return torch.from_numpy(np.frombuffer(joined, dtype=np.int32).reshape(len(rows), width))

    def tokens_of(
        self, rows: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> tuple[list[int], list[int], list[int]]:
        """Flat over the tokens that the rows compute: ids, positions, slots. In plain Python, which for the usual one
        token per row is faster than arrays are, and holds on to the interpreter's lock, which numpy lets go of where
        500 elements are copied: between a delivery and the forward that is to wait for all that the event loop makes
        of the delivery."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        id_of, block_of, size = self.token_ids.data, self.block_table.data, self.block_size
        for row, start, count in zip(rows, starts, counts, strict=True):
            if count == 1:
                ids.append(id_of[row, start])
                positions.append(start)
                slots.append(block_of[row, start // size] * size + start % size)
                continue
            ids += self.token_ids[row, start : start + count].tolist()
            places = np.arange(start, start + count)
            positions += places.tolist()
            slots += (self.block_table[row, places // size].astype(np.int64) * size + places % size).tolist()
        return ids, positions, slots


class ForwardBatch(NamedTuple):
    """What one forward reads, flat over all scheduled tokens: in the order of ScheduledBatch.rows, but adapter by
    adapter.

    sampled: indices into ScheduledBatch.rows that sample, in the order of the next three;
    logits_source[i]: which of the computed logits rows sampled[i] uses (forked siblings share one);
    sampled_rows[i], sampled_ends[i]: its row, and the position that its token will have;
    scored: (index into ScheduledBatch.rows, flat place of its first scored token), rows with none left out;
    ends[i]: flat place behind the last token of ScheduledBatch.rows[i], of those that compute any."""

    input_ids: Tensor  # [num_tokens], int64
    positions: Tensor  # [num_tokens], int64
    metadata: AttentionMetadata
    logits_indices: Tensor  # [num_logits], int64: flat token positions whose logits are needed
    sampled: Sequence[int]
    logits_source: Sequence[int]
    sampled_rows: Sequence[int]
    sampled_ends: Sequence[int]
    scored: Sequence[tuple[int, int]]
    ends: Mapping[int, int]
    spans: Spans

    @staticmethod
    def build(batch: ScheduledBatch, table: RowTable) -> ForwardBatch:
        """Gather ids, positions and slots of the scheduled tokens from the row table."""
        rows, computed, counts, _, scored = zip(*batch.rows, strict=True)
        lengths = tuple(map(add, computed, counts))
        sampled, sources, wanted = logits_rows(batch)
        order, spans = _in_order(rows, counts, table)
        ids, positions, slots = table.tokens_of(_pick(rows, order), _pick(computed, order), _pick(counts, order))
        stops = list(accumulate(_pick(counts, order)))
        ends = dict(zip(order, stops, strict=True))
        longest = max(lengths)
        metadata = AttentionMetadata(
            block_tables=table.blocks_of(_pick(rows, order), longest),
            query_start_loc=_int32s([0, *stops]),
            seq_lens=_int32s(_pick(lengths, order)),
            slot_mapping=_int64s(slots),
            max_query_len=max(counts),
            max_seq_len=longest,
        )
        return ForwardBatch(
            input_ids=_int64s(ids),
            positions=_int64s(positions),
            metadata=metadata,
            logits_indices=_int64s([ends[index] - 1 for index in wanted]),
            sampled=sampled,
            logits_source=sources,
            sampled_rows=_pick(rows, sampled),
            sampled_ends=_pick(lengths, sampled),
            scored=[(i, ends[i] - lengths[i] + asked.start) for i, asked in enumerate(scored) if asked],
            ends=ends,
            spans=spans,
        )


def _int64s(numbers: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def _int32s(numbers: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.array(numbers, dtype=np.int32))


def _pick(column: Sequence[int], indices: Sequence[int]) -> Sequence[int]:
    """Mostly all of it, as it is."""
    return column if indices == range(len(column)) else [column[index] for index in indices]


def _in_order(rows: Sequence[int], counts: Sequence[int], table: RowTable) -> tuple[Sequence[int], Spans]:
    """Which of the rows compute anything, those of one adapter side by side, and the tokens of each adapter."""
    if not table.has_adapters:
        return [index for index, num in enumerate(counts) if num] if 0 in counts else range(len(counts)), ()
    computing = [index for index, num in enumerate(counts) if num]
    adapters: list[int] = table.adapters[list(rows)].tolist()
    computing.sort(key=adapters.__getitem__)
    spans, stop = [], 0
    for adapter, members in groupby(computing, adapters.__getitem__):
        start, stop = stop, stop + sum(counts[index] for index in members)
        if adapter:
            spans.append(AdapterSpan(adapter, start, stop))
    return computing, tuple(spans)


def logits_rows(batch: ScheduledBatch) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    """Which rows sample, from which logits row, and the row (index into batch.rows) that makes each logits row."""
    logits_from = [row.logits_from for row in batch.rows]
    everyone = range(len(logits_from))
    if logits_from == list(everyone):  # as in most steps: each from its own
        return everyone, everyone, everyone
    logits_row: dict[int, int] = {}  # index into batch.rows -> logits row
    sampled, sources = [], []
    for index, origin in enumerate(logits_from):
        if origin is not None:
            sampled.append(index)
            sources.append(logits_row.setdefault(origin, len(logits_row)))
    return sampled, sources, list(logits_row)
