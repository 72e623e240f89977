"""From hidden states to one vector per prompt: that of its last token, or the mean over all.

Knows rows and hidden states; knows no model. The sum of a mean is kept per row between the chunks of its prompt, in
float64 and token by token, so that no cut of the prompt shows in the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.batch import NewRow, RowOutput, ScheduledBatch, ScheduledRow
from engine.sampling_params import Pooling

NON_FINITE = "The model produced hidden states that are not finite."


@dataclass(slots=True)
class _PooledRow:
    pooling: Pooling
    num_prompt_tokens: int
    total: npt.NDArray[np.float64] | None = None  # [hidden_size]: sum over the chunks so far


class Pooler:
    """The rows whose prompts become vectors."""

    def __init__(self) -> None:
        self._rows: dict[int, _PooledRow] = {}

    def begin(self, new: NewRow) -> None:
        """A sequence takes the row: whatever was pooled there is over."""
        self._rows.pop(new.row, None)
        if new.params.pooling is not None:
            self._rows[new.row] = _PooledRow(new.params.pooling, new.num_prompt_tokens)

    def asking(self, batch: ScheduledBatch) -> list[int]:
        """Indexes into batch.rows of those that are pooled: their hidden states are needed."""
        return [index for index, row in enumerate(batch.rows) if row.row in self._rows] if self._rows else []

    def pool(self, batch: ScheduledBatch, hidden_states: Tensor, ends: Mapping[int, int]) -> dict[int, RowOutput]:
        """hidden_states: [batch.num_tokens, hidden_size]; ends: by index into batch.rows the place behind a row's last
        one. By index into batch.rows the vectors of the prompts whose last token is among them."""
        outputs: dict[int, RowOutput] = {}
        for index, row in enumerate(batch.rows):
            if row.row in self._rows and row.num_scheduled:
                end = ends[index]
                output = self.take(row, hidden_states[end - row.num_scheduled : end])
                if output is not None:
                    outputs[index] = output
        return outputs

    def num_wanted(self, row: ScheduledRow) -> int:
        """How many of the last tokens of a pooled row's chunk `take` looks at."""
        pooled = self._rows[row.row]
        return row.num_scheduled if pooled.pooling == "mean" else int(_is_last(pooled, row))

    def take(self, row: ScheduledRow, hidden_states: Tensor) -> RowOutput | None:
        """The next chunk of a pooled row. hidden_states: [num_tokens, hidden_size], on the CPU, of all its tokens or
        of the last `num_wanted`. The vector, once it is complete."""
        vector = _take(self._rows[row.row], row, hidden_states)
        if vector is None:
            return None
        del self._rows[row.row]
        return _output(vector)


def _is_last(pooled: _PooledRow, row: ScheduledRow) -> bool:
    return row.num_computed + row.num_scheduled == pooled.num_prompt_tokens


def _take(pooled: _PooledRow, row: ScheduledRow, hidden_states: Tensor) -> npt.NDArray[np.float32] | None:
    """The vector, once it is complete."""
    is_last = _is_last(pooled, row)
    if pooled.pooling == "last":
        return _numbers(hidden_states[-1]) if is_last else None
    if pooled.total is None:
        pooled.total = np.zeros(hidden_states.shape[1], dtype=np.float64)
    for vector in _numbers(hidden_states):
        pooled.total += vector
    return (pooled.total / pooled.num_prompt_tokens).astype(np.float32) if is_last else None


def _numbers(tensor: Tensor) -> npt.NDArray[np.float32]:
    numbers: npt.NDArray[np.float32] = tensor.to(torch.float32).numpy()
    return numbers


def _output(vector: npt.NDArray[np.float32]) -> RowOutput:
    if not np.isfinite(vector).all():
        return RowOutput(error=NON_FINITE)
    return RowOutput(embedding=vector.astype("<f4").tobytes())
