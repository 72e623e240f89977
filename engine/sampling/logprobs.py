"""Logprobs beside the draw: alternatives of output tokens, and what a model thought of its prompt.

Ranking everywhere: the larger logit first, of equal ones the lower id. Every row stands for itself; log-softmax is
of float32 logits with a float64 sum, whatever the model's dtype.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import ops
from engine.outputs import PromptLogprobs, TokenLogprobs

Answer = tuple[float, TokenLogprobs]  # the chosen id's logprob, and the alternatives

SLICE = 64  # rows of logits that exist at a time: 64 x 150,000 ids are 38 MB


@dataclass(frozen=True, slots=True)
class Question:
    """What one row wants told. named: ids beside the `count` most likely ones."""

    row: int  # of the logits
    chosen: int
    count: int
    named: tuple[int, ...] = ()


def answers(logits: Tensor, questions: Sequence[Question]) -> list[Answer]:
    """Per question the logprob of the chosen id, and the alternatives: the most likely ids, then those named that are
    not among them. Banned ids (-inf) are left out. logits: [rows, vocab] float32."""
    if not questions:
        return []
    told = ops.logprobs_topn(
        logits,
        torch.from_numpy(ids_asked(questions)),
        max(q.count for q in questions),
        source=torch.from_numpy(np.array([q.row for q in questions], dtype=np.int64)),
    )
    return answers_from(questions, told.logprobs.tolist(), told.top_ids.tolist(), told.top_logprobs.tolist())


def ids_asked(questions: Sequence[Question]) -> npt.NDArray[np.int64]:
    """Per question the chosen id, then the named ones: [len(questions), num_ids]; zeros where it has fewer."""
    num_named = max([len(q.named) for q in questions])
    return np.array([(q.chosen, *q.named, *[0] * (num_named - len(q.named))) for q in questions], dtype=np.int64)


def answers_from(
    questions: Sequence[Question], logprobs: list[list[float]], top_ids: list[list[int]], top: list[list[float]]
) -> list[Answer]:
    """As `answers`, from what ops.logprobs_topn told of `ids_asked`."""
    rows = zip(questions, logprobs, top_ids, top, strict=True)
    return [(of_ids[0], _alternatives(q, of_ids[1:], ids, best)) for q, of_ids, ids, best in rows]


def _alternatives(question: Question, named: list[float], top_ids: list[int], top: list[float]) -> TokenLogprobs:
    ids, best_logprobs = top_ids[: question.count], top[: question.count]
    if not question.named and (not best_logprobs or best_logprobs[-1] > -math.inf):  # nothing to leave out or to add
        return TokenLogprobs(tuple(ids), tuple(best_logprobs))
    pairs = [(i, p) for i, p in zip(ids, best_logprobs, strict=True) if p > -math.inf]
    best = {token_id for token_id, _ in pairs}
    for token_id, logprob in dict(zip(question.named, named, strict=False)).items():
        if token_id not in best and logprob > -math.inf:
            pairs.append((token_id, logprob))
    return TokenLogprobs(tuple([i for i, _ in pairs]), tuple([p for _, p in pairs]))


def score_prompt(
    logits_of: Callable[[Tensor], Tensor],
    hidden_states: Tensor,  # [num_tokens, hidden_size], of the tokens before those that are scored
    token_ids: Tensor,  # [num_tokens], int64: the prompt tokens that follow them
    num_top: int,
    vocab_size: int,
) -> PromptLogprobs | None:
    """Logprob, rank and alternatives of each token. logits_of: hidden states [rows, hidden_size] to logits [rows,
    vocab] float32, called with at most SLICE rows. None if the model's logits are not finite."""
    num_top = min(num_top, vocab_size)
    told = PromptLogprobs(num_top, array("f"), array("i"), array("i"), array("f"))
    for rows, wanted in zip(torch.split(hidden_states, SLICE), torch.split(token_ids, SLICE), strict=True):
        logits = logits_of(rows)[:, :vocab_size]
        each = ops.logprobs_topn(logits, wanted.unsqueeze(1), num_top, ranks=True)
        if not bool(torch.isfinite(each.logprobs).all() and torch.isfinite(each.top_logprobs).all()):
            return None
        told.logprobs.frombytes(each.logprobs.numpy().tobytes())
        told.ranks.frombytes(each.ranks.numpy().tobytes())
        told.top_ids.frombytes(each.top_ids.to(torch.int32).numpy().tobytes())
        told.top_logprobs.frombytes(each.top_logprobs.numpy().tobytes())
    return told
