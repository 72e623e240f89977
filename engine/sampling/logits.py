"""Logits processors as one ordered tuple of small functions: penalties, bias, the minimum length.

Each changes one row in place and depends on that row alone. Presence and frequency penalties count output tokens
(OpenAI); the repetition penalty covers prompt and output (CTRL paper, arXiv:1909.05858, as transformers does).
Counts are derived from the row's token ids at each step, so that preemption has nothing to restore.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RowContext:
    """What a processor may look at."""

    params: SamplingParams
    token_ids: npt.NDArray[np.int32]  # [num_tokens]: prompt and output so far
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens


Processor = Callable[[Tensor, RowContext], None]  # (logits [vocab] float32, changed in place; context)


def repetition_penalty(logits: Tensor, context: RowContext) -> None:
    penalty = context.params.repetition_penalty
    if penalty == 1.0:
        return
    seen = torch.from_numpy(np.unique(context.token_ids).astype(np.int64))
    values = logits[seen]
    logits[seen] = torch.where(values > 0, values / penalty, values * penalty)


def count_penalties(logits: Tensor, context: RowContext) -> None:
    params = context.params
    if params.presence_penalty == 0 and params.frequency_penalty == 0:
        return
    ids, counts = np.unique(context.token_ids[context.num_prompt_tokens :], return_counts=True)
    penalty = params.presence_penalty + params.frequency_penalty * counts.astype(np.float32)
    logits[torch.from_numpy(ids.astype(np.int64))] -= torch.from_numpy(penalty.astype(np.float32))


def logit_bias(logits: Tensor, context: RowContext) -> None:
    bias = context.params.logit_bias
    if bias:
        ids = torch.tensor([i for i, _ in bias], dtype=torch.int64)
        logits[ids] += torch.tensor([b for _, b in bias], dtype=torch.float32)


def min_tokens(logits: Tensor, context: RowContext) -> None:
    params = context.params
    if context.num_output_tokens < params.min_tokens:
        stops = (*context.eos_token_ids, *params.stop_token_ids)
        logits[torch.tensor(stops, dtype=torch.int64)] = -torch.inf


PROCESSORS: tuple[Processor, ...] = (repetition_penalty, count_penalties, logit_bias, min_tokens)


def needs_processing(params: SamplingParams) -> bool:
    """False for the common request, whose logits are sampled as the model made them."""
    return params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0 or params.structured is not None
