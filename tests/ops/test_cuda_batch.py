"""Batches prepared on the device, against the engine's own on the host."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.kernels import LaunchedOps

BLOCK, ROWS, MAX_TOKENS = 16, 9, 320


def state(seed: int = 0) -> tuple[Tensor, Tensor]:
    """token_ids [ROWS, MAX_TOKENS] and block tables [ROWS, 20], -1 behind the blocks that a row has."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 50_000, (ROWS, MAX_TOKENS), generator=generator, dtype=torch.int32)
    tables = torch.randperm(ROWS * 20, generator=generator).int().view(ROWS, 20)
    return ids, tables


def test_prepare_batch(launched: LaunchedOps) -> None:
    ids, tables = state()
    rows, computed, counts = [7, 0, 3, 8, 1], [0, 255, 16, 17, 300], [130, 1, 2, 257, 15]
    total, seqs, width = sum(counts), len(rows), 19
    long = {name: torch.full((total,), -7, dtype=torch.int64) for name in ("input_ids", "positions", "slots")}
    starts, lengths = torch.full((seqs + 1,), -7).int(), torch.full((seqs,), -7).int()
    tables_out, last = torch.full((seqs, width), -7).int(), torch.full((seqs,), -7, dtype=torch.int64)
    outputs = [*long.values(), starts, lengths, tables_out, last]
    launched.launch(
        "prepare_batch", ids, ids.stride(0), tables, tables.stride(0), BLOCK, torch.tensor(rows),
        torch.tensor(computed).int(), torch.tensor(counts).int(), seqs, width, *outputs, changes=outputs,
    )  # fmt: skip
    positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, counts, strict=True)])
    row_of = np.repeat(rows, counts)
    assert long["positions"].tolist() == positions.tolist()
    assert long["input_ids"].tolist() == ids.numpy()[row_of, positions].tolist()
    slots = tables.numpy()[row_of, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    assert long["slots"].tolist() == slots.tolist()
    assert starts.tolist() == [0, *np.cumsum(counts).tolist()]
    assert lengths.tolist() == [c + n for c, n in zip(computed, counts, strict=True)]
    assert last.tolist() == (np.cumsum(counts) - 1).tolist()
    assert torch.equal(tables_out, tables[rows, :width])


def test_many_sequences(launched: LaunchedOps) -> None:
    """More than a block's threads, so that the sum of the counts before one takes more than a round."""
    ids, tables = state(1)
    seqs = 300
    rows = torch.arange(seqs) % ROWS
    counts = (1 + torch.arange(seqs) % 3).int()
    outputs = [torch.full((int(counts.sum()),), -7, dtype=torch.int64) for _ in range(3)]
    outputs += [torch.zeros(seqs + 1).int(), torch.zeros(seqs).int(), torch.zeros(seqs, 1).int()]
    outputs += [torch.zeros(seqs, dtype=torch.int64)]
    computed = (torch.arange(seqs) % 50).int()
    launched.launch(
        "prepare_batch", ids, ids.stride(0), tables, tables.stride(0), BLOCK, rows, computed, counts, seqs, 1,
        *outputs, changes=outputs,
    )  # fmt: skip
    assert outputs[3].tolist() == [0, *counts.cumsum(0).tolist()]
    assert torch.equal(outputs[6], counts.cumsum(0) - 1)
    want = torch.cat([torch.arange(c, c + n) for c, n in zip(computed.tolist(), counts.tolist(), strict=True)])
    assert torch.equal(outputs[1], want)


@pytest.mark.parametrize("capacity", [4, 8, 130])
def test_advance_batch(launched: LaunchedOps, capacity: int) -> None:
    ids, tables = state(2)
    before = ids.clone()
    rows = torch.full((capacity,), 5)
    rows[:4] = torch.tensor([6, -1, 2, 8])
    drawn = torch.full((capacity,), 999)
    drawn[:4] = torch.tensor([11, 12, -1, 14])
    lengths = torch.full((capacity,), 3).int()
    lengths[:4] = torch.tensor([15, 4, 16, 300])
    long = [torch.full((capacity,), -7, dtype=torch.int64) for _ in range(3)]
    changed = [ids, *long, lengths]
    launched.launch(
        "advance_batch", ids, ids.stride(0), tables, tables.stride(0), BLOCK, rows, drawn,
        torch.tensor([4]).int(), capacity, *long, lengths, changes=changed,
    )  # fmt: skip
    input_ids, positions, slots = long
    padding = capacity - 4
    assert input_ids.tolist() == [11, 0, 0, 14] + [0] * padding
    assert positions.tolist() == [15, 0, 16, 300] + [0] * padding
    want = [tables[row, p // BLOCK] * BLOCK + p % BLOCK for row, p in ((6, 15), (2, 16), (8, 300))]
    assert slots.tolist() == [want[0], -1, want[1], want[2]] + [-1] * padding
    assert lengths.tolist() == [16, 0, 17, 301] + [0] * padding
    for row, position, token in ((6, 15, 11), (2, 16, 0), (8, 300, 14)):
        before[row, position] = token
    assert torch.equal(ids, before)
