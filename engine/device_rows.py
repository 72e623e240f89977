"""The rows' tokens and block tables where the device reads them, kept up to date by the deltas of each batch.

Beside them the tokens that the host knows: what it was told of and what has come back. A token that is drawn goes to
the device's table at once and to the host's when its step is read. Knows rows, tokens and blocks; no model, no
sampling. (What sampling looks at per row stays on the host and travels with the step that needs it, a few bytes per
row: see sampling/device_sampler.py.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import ScheduledBatch
from engine.step_buffers import Staged, Upload

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class DeviceRows:
    def __init__(self, num_rows: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        self.block_size = block_size
        max_tokens = max_model_len + 1
        # zeros: what was never written is a token and a block all the same
        self.token_ids = torch.zeros((num_rows, max_tokens), dtype=torch.int32, device=device)
        max_blocks = -(-max_tokens // block_size)
        self.block_tables = torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device)
        self.known_ids: Int32s = np.zeros((num_rows, max_tokens), dtype=np.int32)  # as far as the host knows them
        self.num_prompt_tokens: Int32s = np.zeros(num_rows, dtype=np.int32)

    def take(self, batch: ScheduledBatch) -> None:
        """The host's part of the deltas."""
        for new in batch.new_rows:
            self.known_ids[new.row, : len(new.token_ids)] = new.token_ids
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
        for tokens in batch.new_tokens:
            self.known_ids[tokens.row, tokens.start : tokens.start + len(tokens.token_ids)] = tokens.token_ids

    def stage(self, batch: ScheduledBatch, upload: Upload) -> RowDeltas:
        """The device's part, in one upload with whatever else the step needs; the host's was taken."""
        known = self.known_ids
        tokens: list[_Run] = [(new.row, 0, known[new.row, : len(new.token_ids)]) for new in batch.new_rows]
        tokens += [
            (told.row, told.start, known[told.row, told.start : told.start + len(told.token_ids)])
            for told in batch.new_tokens
        ]
        blocks: list[_Run] = [(new.row, 0, new.block_tables[0]) for new in batch.new_rows]
        blocks += [(told.row, told.start, told.block_ids) for told in batch.new_blocks]
        return RowDeltas(_Scatter.of(tokens, self.token_ids, upload), _Scatter.of(blocks, self.block_tables, upload))


_Run = tuple[int, int, Sequence[int] | Int32s]  # row, start, values


@dataclass(frozen=True, slots=True)
class _Scatter:
    table: Tensor  # [num_rows, width]
    places: Staged  # [n], int64, in the flat table; of equal ones the values are equal too
    values: Staged  # [n], int32

    @staticmethod
    def of(runs: Sequence[_Run], table: Tensor, upload: Upload) -> _Scatter | None:
        lengths: Int64s = np.array([len(values) for _, _, values in runs], dtype=np.int64)
        num_values = int(lengths.sum())
        if not num_values:
            return None
        starts: Int64s = np.array([row * table.shape[1] + start for row, start, _ in runs], dtype=np.int64)
        places = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths) + np.arange(num_values)
        values = np.concatenate([np.asarray(values, dtype=np.int32) for _, _, values in runs])
        return _Scatter(table, upload.add(places), upload.add(values))

    def apply(self) -> None:
        self.table.view(-1).index_copy_(0, self.places.tensor, self.values.tensor)


@dataclass(frozen=True, slots=True)
class RowDeltas:
    tokens: _Scatter | None
    blocks: _Scatter | None

    def apply(self) -> None:
        """After the upload was sent."""
        for scatter in (self.tokens, self.blocks):
            if scatter is not None:
                scatter.apply()
