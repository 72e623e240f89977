"""From a `ScheduledBatch` to tensors: the per-row host state and the flat batch of one forward.

Knows rows, tokens and block tables; knows no model and no sampling.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata
from engine.batch import ScheduledBatch
from engine.models.deltas import AdapterSpan, Spans

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]


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


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The tensors of one forward, flat over all scheduled tokens: in the order of ScheduledBatch.rows, but adapter by
    adapter.

    sampled: indices into ScheduledBatch.rows that sample, in the order of the next three;
    logits_source[i]: which of the computed logits rows sampled[i] uses (forked siblings share one);
    sampled_rows[i], sampled_ends[i]: its row, and the position that its token will have;
    scored: (index into ScheduledBatch.rows, flat place of its first scored token), rows with none left out;
    ends[i]: flat place behind the last token of ScheduledBatch.rows[i], if it computes any."""

    input_ids: Tensor  # [num_tokens], int64
    positions: Tensor  # [num_tokens], int64
    metadata: AttentionMetadata
    logits_indices: Tensor  # [num_logits], int64: flat token positions whose logits are needed
    sampled: tuple[int, ...]
    logits_source: Int64Array  # [len(sampled)]
    sampled_rows: Int64Array  # [len(sampled)]
    sampled_ends: Int64Array  # [len(sampled)]
    scored: tuple[tuple[int, int], ...]
    ends: Int64Array  # [len(ScheduledBatch.rows)]
    spans: Spans

    @staticmethod
    def build(batch: ScheduledBatch, table: RowTable) -> ForwardBatch:
        """Gather ids, positions and slots of the scheduled tokens from the row table."""
        every = np.array([(r.row, r.num_computed, r.num_scheduled) for r in batch.rows], dtype=np.int64)
        computed, spans = _by_adapter(np.flatnonzero(every[:, 2]), every, table)
        rows, starts, counts = every[computed].T
        ends = np.cumsum(counts)

        row_of = np.repeat(rows, counts)  # [num_tokens]
        positions = np.arange(ends[-1], dtype=np.int64) + np.repeat(starts - (ends - counts), counts)
        blocks = table.block_table[row_of, positions // table.block_size].astype(np.int64)
        slots = blocks * table.block_size + positions % table.block_size
        seq_lens = starts + counts
        max_seq_len = int(seq_lens.max())
        num_blocks = -(-max_seq_len // table.block_size)
        query_start_loc = np.zeros(len(rows) + 1, dtype=np.int32)
        query_start_loc[1:] = ends
        metadata = AttentionMetadata(
            block_tables=torch.from_numpy(table.block_table[rows, :num_blocks]),
            query_start_loc=torch.from_numpy(query_start_loc),
            seq_lens=torch.from_numpy(seq_lens.astype(np.int32)),
            slot_mapping=torch.from_numpy(slots),
            max_query_len=int(counts.max()),
            max_seq_len=max_seq_len,
        )
        sampled, sources, wanted = logits_rows(batch)
        of_computed = np.zeros(len(every), dtype=np.int64)
        of_computed[computed] = ends  # by index into batch.rows: flat place behind the last token
        of_sampled = every[np.array(sampled, dtype=np.int64)]
        return ForwardBatch(
            input_ids=torch.from_numpy(table.token_ids[row_of, positions].astype(np.int64)),
            positions=torch.from_numpy(positions),
            metadata=metadata,
            logits_indices=torch.from_numpy(of_computed[np.array(wanted, dtype=np.int64)] - 1),
            sampled=sampled,
            logits_source=np.array(sources, dtype=np.int64),
            sampled_rows=of_sampled[:, 0].copy(),
            sampled_ends=of_sampled[:, 1] + of_sampled[:, 2],
            scored=tuple(
                (i, int(of_computed[i]) - (r.num_computed + r.num_scheduled) + r.scored.start)
                for i, r in enumerate(batch.rows)
                if r.scored
            ),
            ends=of_computed,
            spans=spans,
        )


def _by_adapter(computed: Int64Array, every: Int64Array, table: RowTable) -> tuple[Int64Array, Spans]:
    """computed: indices into `every` of rows that compute. The same with those of one adapter side by side, and the
    tokens of each."""
    if not table.has_adapters:
        return computed, ()
    adapters = table.adapters[every[computed, 0]]
    order = np.argsort(adapters, kind="stable")
    computed, adapters = computed[order], adapters[order]
    ends = np.cumsum(every[computed, 2])
    known, first, counts = np.unique(adapters, return_index=True, return_counts=True)
    stops = ends[first + counts - 1].tolist()
    starts = [0, *stops[:-1]]
    return computed, tuple(
        AdapterSpan(adapter, start, stop)
        for adapter, start, stop in zip(known.tolist(), starts, stops, strict=True)
        if adapter
    )


def logits_rows(batch: ScheduledBatch) -> tuple[tuple[int, ...], list[int], list[int]]:
    """Which rows sample, from which logits row, and the row (index into batch.rows) that makes each logits row."""
    logits_row: dict[int, int] = {}  # index into batch.rows -> logits row
    sampled, sources = [], []
    for index, row in enumerate(batch.rows):
        if row.logits_from is not None:
            sampled.append(index)
            sources.append(logits_row.setdefault(row.logits_from, len(logits_row)))
    return tuple(sampled), sources, list(logits_row)
