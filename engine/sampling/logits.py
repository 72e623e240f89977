"""What changes logits before the draw, gathered from the rows of a step for one native call: penalties, biases, bans.

Each row is changed by its own parameters and tokens alone. Presence and frequency penalties count output tokens
(OpenAI); the repetition penalty covers prompt and output (CTRL paper, arXiv:1909.05858, as transformers does).
Counts are derived from the row's token ids at each step, so that preemption has nothing to restore.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine import ops
from engine.sampling_params import SamplingParams

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class RowContext(NamedTuple):
    """What a row's edits may look at."""

    params: SamplingParams
    token_ids: Int32s  # [num_tokens]: prompt and output so far
    num_prompt_tokens: int
    eos_token_ids: tuple[int, ...]

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def banned(self) -> Sequence[int]:
        """Ids that may not follow yet: whatever would end the text before min_tokens."""
        params = self.params
        if self.num_output_tokens >= params.min_tokens:
            return ()
        return (*self.eos_token_ids, *params.stop_token_ids)


def is_special(params: SamplingParams) -> bool:
    """False for the common request: its token is drawn from the logits as the model made them, and that is all."""
    edited = params.has_penalties or bool(params.logit_bias) or params.min_tokens > 0 or params.structured is not None
    return edited or params.logprobs is not None or params.beam is not None


def penalties(contexts: Mapping[int, RowContext], num_rows: int) -> ops.Penalties | None:
    """contexts: by row of the step, in ascending order; other rows have no penalties."""
    contexts = {i: context for i, context in contexts.items() if context.params.has_penalties}
    if not contexts:
        return None
    values = np.tile(np.array([1, 0, 0], dtype=np.float32), (num_rows, 1))
    counts, prompts = np.zeros(num_rows + 1, dtype=np.int64), np.zeros(num_rows, dtype=np.int64)
    parts = []
    for i, context in contexts.items():
        params, token_ids = context.params, context.token_ids
        values[i] = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        if params.repetition_penalty == 1:
            token_ids = token_ids[context.num_prompt_tokens :]
        else:
            prompts[i] = context.num_prompt_tokens
        counts[i + 1] = len(token_ids)
        parts.append(token_ids)
    starts = np.cumsum(counts)
    return ops.Penalties(
        values=torch.from_numpy(values),
        token_ids=torch.from_numpy(np.concatenate(parts)),
        token_starts=torch.from_numpy(starts),
        output_starts=torch.from_numpy(starts[:-1] + prompts),
    )


def bias_of(params: SamplingParams) -> tuple[Int32s, Float32s] | None:
    """The request's own biases: ids and values. Gathered once, when its sequence takes a row."""
    if not params.logit_bias:
        return None
    ids, values = zip(*params.logit_bias, strict=True)
    return np.array(ids, dtype=np.int32), np.array(values, dtype=np.float32)


def biases(
    given: Mapping[int, tuple[Int32s, Float32s]], banned: Mapping[int, Sequence[int]], num_rows: int
) -> ops.Biases | None:
    """given: ids and values by row of the step; banned: ids by row."""
    touched = sorted(given.keys() | banned.keys())
    if not touched:
        return None
    ids: list[Int32s] = []
    values: list[Float32s] = []
    counts = np.zeros(num_rows + 1, dtype=np.int64)
    for i in touched:
        if i in given:
            ids.append(given[i][0])
            values.append(given[i][1])
        if i in banned:
            ids.append(np.array(banned[i], dtype=np.int32))
            values.append(np.full(len(banned[i]), -math.inf, dtype=np.float32))
        counts[i + 1] = len(given[i][0] if i in given else ()) + len(banned.get(i, ()))
    return ops.Biases(
        ids=torch.from_numpy(np.concatenate(ids)),
        values=torch.from_numpy(np.concatenate(values)),
        starts=torch.from_numpy(np.cumsum(counts)),
    )
