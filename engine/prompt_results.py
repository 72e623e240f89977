"""What a step on a device tells of prompts: the logprobs of their tokens, and the vectors they become.

Asked while the step is issued, read when it has come back; the numbers are those of score_prompt and Pooler.pool.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.batch import RowOutput, ScheduledBatch
from engine.device_batch import StepLayout
from engine.device_rows import DeviceRows
from engine.outputs import PromptLogprobs
from engine.pooling import Pooler
from engine.sampling.logprobs import SLICE
from engine.sampling.sampler import NON_FINITE
from engine.sampling_params import SamplingParams
from engine.step_buffers import Download, Fetched, Staged, Upload


@dataclass(frozen=True, slots=True)
class _Told:
    """Of one slice of a prompt, as ops.TopLogprobs."""

    logprobs: Fetched
    top_ids: Fetched
    top_logprobs: Fetched
    ranks: Fetched


class PromptResults:
    """One step's. `of` gives the parameters of a row."""

    def __init__(
        self, batch: ScheduledBatch, layout: StepLayout, pooler: Pooler, of: Callable[[int], SamplingParams]
    ) -> None:
        self._batch = batch
        self._scored = layout.scored
        self._pooler = pooler
        self._of = of
        self._following: dict[int, Staged] = {}
        self._told: dict[int, list[_Told]] = {}
        self._vectors: dict[int, Fetched] = {}
        self._refused: dict[int, RowOutput] = {}
        self._pooled = pooler.asking(batch)

    @property
    def wants_hidden_states(self) -> bool:
        return bool(self._scored or self._pooled)

    def refuse(self, no_logprobs: RowOutput, no_embeddings: RowOutput) -> None:
        """For a model that does not tell hidden states."""
        self._refused = {index: no_logprobs for index, _ in self._scored} | dict.fromkeys(self._pooled, no_embeddings)

    def stage(self, rows: DeviceRows, upload: Upload) -> None:
        """The tokens whose logprobs are asked for; those of a prompt are known."""
        for index, _ in self._scored:
            row = self._batch.rows[index]
            ids = rows.known_ids[row.row, row.scored.start + 1 : row.scored.stop + 1]
            self._following[index] = upload.add(ids.astype(np.int64))

    def ask(
        self, hidden_states: Tensor, logits_of: Callable[[Tensor], Tensor], vocab_size: int, download: Download
    ) -> None:
        """hidden_states: [num_tokens, hidden_size], flat over the batch. logits_of, vocab_size: as in score_prompt."""
        for index, flat in self._scored:
            row = self._batch.rows[index]
            num_top = min(self._of(row.row).prompt_logprobs or 0, vocab_size)
            scored, following = hidden_states[flat : flat + len(row.scored)], self._following[index].tensor
            self._told[index] = [
                _ask_slice(logits_of(states)[:, :vocab_size], ids, num_top, download)
                for states, ids in zip(torch.split(scored, SLICE), torch.split(following, SLICE), strict=True)
            ]
        ends = np.cumsum([row.num_scheduled for row in self._batch.rows])
        for index in self._pooled:
            if num_wanted := self._pooler.num_wanted(self._batch.rows[index]):
                end = int(ends[index])
                self._vectors[index] = download.add(hidden_states[end - num_wanted : end].to(torch.float32))

    def read(self) -> dict[int, RowOutput]:
        """Once the download has arrived: by index into batch.rows what is told."""
        outputs = dict(self._refused)
        for index, vectors in self._vectors.items():
            output = self._pooler.take(self._batch.rows[index], torch.from_numpy(vectors.array))
            if output is not None:
                outputs[index] = output
        for index, parts in self._told.items():
            told = _joined(parts)
            outputs[index] = RowOutput(prompt_logprobs=told, error=NON_FINITE if told is None else None)
        return outputs


def _ask_slice(logits: Tensor, ids: Tensor, num_top: int, download: Download) -> _Told:
    told = ops.logprobs_topn(logits, ids.unsqueeze(1), num_top, ranks=True)
    return _Told(
        download.add(told.logprobs),
        download.add(told.top_ids.to(torch.int32)),
        download.add(told.top_logprobs),
        download.add(told.ranks),
    )


def _joined(parts: list[_Told]) -> PromptLogprobs | None:
    told = PromptLogprobs(parts[0].top_ids.array.shape[1], array("f"), array("i"), array("i"), array("f"))
    for part in parts:
        if not (np.isfinite(part.logprobs.array).all() and np.isfinite(part.top_logprobs.array).all()):
            return None
        told.logprobs.frombytes(part.logprobs.array.tobytes())
        told.ranks.frombytes(part.ranks.array.tobytes())
        told.top_ids.frombytes(part.top_ids.array.tobytes())
        told.top_logprobs.frombytes(part.top_logprobs.array.tobytes())
    return told
