"""What changes logits before the draw, on a device: penalties from counts that it keeps, biases and bans, masks.

The same changes in the same order as engine/sampling/logits.py gathers for the CPU. What a row's tokens add up to is
kept on the device, since the host learns of a token too late; what follows from their number travels with the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine import device_ops
from engine.batch import NewRow
from engine.device_rows import Int64s
from engine.sampling.logits import Float32s, Int32s, RowContext
from engine.step_buffers import Staged, Upload


class PenaltyCounts:
    """How often every row's output holds an id, and which ids its prompt holds. Memory is taken with the first row
    that has a penalty: 4 bytes per row and id."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._tables: tuple[Tensor, Tensor] | None = None

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """counts [num_rows, vocab] and prompt bits [num_rows, words], int32."""
        if self._tables is None:
            words = -(-self._vocab_size // 32)
            self._tables = (
                torch.zeros((self._num_rows, self._vocab_size), dtype=torch.int32, device=self._device),
                torch.zeros((self._num_rows, words), dtype=torch.int32, device=self._device),
            )
        return self._tables

    def stage(self, new_rows: Iterable[NewRow], upload: Upload) -> StagedCounts | None:
        """new_rows: those with penalties count anew what they hold."""
        counted = [new for new in new_rows if new.params.has_penalties]
        if not counted:
            return None
        return StagedCounts(
            self,
            upload.add(np.array([new.row for new in counted], dtype=np.int64)),
            upload.add(np.array([new.num_prompt_tokens for new in counted], dtype=np.int32)),
            upload.add(np.array([len(new.token_ids) for new in counted], dtype=np.int32)),
        )


@dataclass(frozen=True, slots=True)
class StagedCounts:
    counts: PenaltyCounts
    rows: Staged
    num_prompt: Staged
    num_tokens: Staged

    def load(self, token_ids: Tensor) -> None:
        """token_ids: of all rows, their deltas applied."""
        device_ops.load_counts(
            *self.counts.tables, self.rows.tensor, token_ids, self.num_prompt.tensor, self.num_tokens.tensor
        )


@dataclass(frozen=True, slots=True)
class StagedPenalties:
    counts: PenaltyCounts
    presence: Staged  # [n], float32, as the next two; 0, 0 and 1 of rows without
    frequency: Staged
    repetition: Staged

    @staticmethod
    def of(
        contexts: Mapping[int, RowContext], num_rows: int, counts: PenaltyCounts, upload: Upload
    ) -> StagedPenalties | None:
        """contexts: by row of the step."""
        given = {i: context.params for i, context in contexts.items() if context.params.has_penalties}
        if not given:
            return None
        values = np.tile(np.array([[0], [0], [1]], dtype=np.float32), (1, num_rows))
        for i, params in given.items():
            values[:, i] = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        return StagedPenalties(counts, *(upload.add(each) for each in values))

    def apply(self, logits: Tensor, rows: Tensor) -> None:
        device_ops.apply_penalties(
            logits, rows, *self.counts.tables, self.presence.tensor, self.frequency.tensor, self.repetition.tensor
        )


@dataclass(frozen=True, slots=True)
class StagedBiases:
    rows: Staged  # [k], int64: rows of the step
    ids: Staged  # [k], int64
    values: Staged  # [k], float32

    @staticmethod
    def of(
        given: Mapping[int, tuple[Int32s, Float32s]], banned: Mapping[int, Sequence[int]], upload: Upload
    ) -> StagedBiases | None:
        """given: ids and values by row of the step; banned: ids by row."""
        parts = [(i, ids.astype(np.int64), values) for i, (ids, values) in given.items()]
        for i, each in banned.items():
            ids = np.array(each, dtype=np.int64)
            parts.append((i, ids, np.full(len(ids), -math.inf, dtype=np.float32)))
        if not parts:
            return None
        rows: Int64s = np.repeat(
            np.array([i for i, _, _ in parts], dtype=np.int64), np.array([len(ids) for _, ids, _ in parts])
        )
        return StagedBiases(
            upload.add(rows),
            upload.add(np.concatenate([ids for _, ids, _ in parts])),
            upload.add(np.concatenate([values for _, _, values in parts])),
        )

    def apply(self, logits: Tensor) -> None:
        device_ops.add_bias(logits, self.rows.tensor, self.ids.tensor, self.values.tensor)


@dataclass(frozen=True, slots=True)
class StagedMasks:
    words: Staged  # [m, words], int32
    rows: Staged  # [m], int64: rows of the step
    source: Staged  # [m], int64: the logits rows as the model made them

    @staticmethod
    def of(words: Int32s, rows: Int64s, source: Int64s, upload: Upload) -> StagedMasks:
        return StagedMasks(upload.add(words), upload.add(rows), upload.add(source))

    def apply(self, logits: Tensor, raw: Tensor) -> None:
        """Where the edits leave nothing of what the mask allows, the mask alone counts."""
        edited = logits.index_select(0, self.rows.tensor)
        alone = raw.index_select(0, self.source.tensor)
        device_ops.apply_token_bitmask(edited, self.words.tensor)
        device_ops.apply_token_bitmask(alone, self.words.tensor)
        is_nothing = edited.amax(1, keepdim=True) == -torch.inf
        logits.index_copy_(0, self.rows.tensor, torch.where(is_nothing, alone, edited))
