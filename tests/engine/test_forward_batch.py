"""The tensors of a forward, against what the rows hold, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batch import NewRow, ScheduledBatch, ScheduledRow
from engine.forward_batch import ForwardBatch, RowTable
from engine.models.deltas import AdapterSpan
from engine.sampling_params import SamplingParams

BLOCK, MAX_LEN, NUM_ROWS = 16, 96, 6
GREEDY = SamplingParams(temperature=0.0)


def filled_table(adapters: tuple[int, ...] = (0,) * NUM_ROWS) -> RowTable:
    table, draw = RowTable(NUM_ROWS, MAX_LEN, BLOCK), np.random.default_rng(0)
    blocks = draw.permutation(200)[: NUM_ROWS * 7].reshape(NUM_ROWS, 7)
    rows = tuple(
        NewRow(
            row=row,
            token_ids=tuple(draw.integers(0, 999, 90).tolist()),
            num_prompt_tokens=40,
            block_tables=(tuple(blocks[row].tolist()),),
            params=GREEDY,
            seed_key=0,
            eos_token_ids=(),
            adapter=adapter,
        )
        for row, adapter in enumerate(adapters)
    )
    table.apply(ScheduledBatch(0, new_rows=rows))
    return table


ALL_DECODE = tuple(ScheduledRow(row, 30 + 7 * row, 1, index) for index, row in enumerate((4, 0, 5, 2)))
MIXED = (
    ScheduledRow(3, 47, 1, 0),
    ScheduledRow(1, 16, 33, None, range(20, 39)),  # a chunk that is not the last
    ScheduledRow(5, 0, 40, 2),
    ScheduledRow(0, 40, 0, 2),  # forked from the row before
    ScheduledRow(2, 63, 1, 4),
)


def check(batch: ScheduledBatch, table: RowTable, order: list[int]) -> ForwardBatch:
    """order: which of batch.rows compute, as they shall stand in the forward."""
    made = ForwardBatch.build(batch, table)
    places = [(batch.rows[i].row, p) for i in order for p in range(batch.rows[i].num_computed, batch.rows[i].end)]
    assert made.input_ids.tolist() == [table.token_ids[row, p] for row, p in places]
    assert made.positions.tolist() == [p for _, p in places]
    slots = [table.block_table[row, p // BLOCK] * BLOCK + p % BLOCK for row, p in places]
    assert made.metadata.slot_mapping.tolist() == slots
    starts = made.metadata.query_start_loc.tolist()
    assert np.diff(starts).tolist() == [batch.rows[i].num_scheduled for i in order]
    assert made.metadata.seq_lens.tolist() == [batch.rows[i].end for i in order]
    longest = max(row.end for row in batch.rows)
    assert (made.metadata.max_query_len, made.metadata.max_seq_len) == (max(np.diff(starts)), longest)
    width = -(-longest // BLOCK)
    tables = [table.block_table[batch.rows[i].row, :width].tolist() for i in order]
    assert made.metadata.block_tables.tolist() == tables
    for index, source in zip(made.sampled, made.logits_source, strict=True):
        origin = batch.rows[batch.rows[index].logits_from or 0]
        assert places[made.logits_indices[source]] == (origin.row, origin.end - 1)
    sampled = [row for row in batch.rows if row.logits_from is not None]
    assert list(made.sampled_rows) == [row.row for row in sampled]
    assert list(made.sampled_ends) == [row.end for row in sampled]
    for index, first in made.scored:
        assert places[first] == (batch.rows[index].row, batch.rows[index].scored.start)
    return made


@pytest.mark.parametrize("rows", [ALL_DECODE, MIXED])
def test_rows_are_laid_out_one_after_another(rows: tuple[ScheduledRow, ...]) -> None:
    made = check(ScheduledBatch(1, rows=rows), filled_table(), [i for i, row in enumerate(rows) if row.num_scheduled])
    assert made.spans == ()


def test_forked_rows_share_a_row_of_logits() -> None:
    made = ForwardBatch.build(ScheduledBatch(1, rows=MIXED), filled_table())
    assert (list(made.sampled), list(made.logits_source)) == ([0, 2, 3, 4], [0, 1, 1, 2])
    assert [index for index, _ in made.scored] == [1]


def test_rows_of_one_adapter_stand_side_by_side() -> None:
    table = filled_table(adapters=(2, 1, 2, 0, 0, 1))
    made = check(ScheduledBatch(1, rows=MIXED), table, [0, 1, 2, 4])
    assert made.spans == (AdapterSpan(1, 1, 74), AdapterSpan(2, 74, 75))
    made = check(ScheduledBatch(1, rows=ALL_DECODE), table, [0, 2, 1, 3])
    assert made.spans == (AdapterSpan(1, 1, 2), AdapterSpan(2, 2, 4))
