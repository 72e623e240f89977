"""Logprobs beside the draw: alternatives of output tokens, and what a model thought of its prompt.

Ranking everywhere: the larger logit first, of equal ones the lower id. Every row stands for itself; log-softmax is
of float32 logits with a float64 sum, whatever the model's dtype.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.outputs import PromptLogprobs, TokenLogprobs
from engine.sampling.reference import weights
from engine.sampling_params import SamplingParams

SLICE = 64  # rows of logits that exist at a time: 64 x 150,000 ids are 38 MB


def top_ids(logits: Tensor, count: int) -> Tensor:
    """The `count` most likely ids of each row of logits [rows, vocab] float32: [rows, count] int64."""
    count = min(count, logits.shape[1])
    if count == 0:
        return torch.empty((len(logits), 0), dtype=torch.int64)
    values, ids = torch.topk(logits, min(count + 1, logits.shape[1]))  # one more tells of a tie at the end
    for row in torch.nonzero((values[:, 1:] == values[:, :-1]).any(1))[:, 0].tolist():
        ids[row, :count] = _ranked(logits[row], values[row, count - 1], count)  # topk leaves ties open
    return ids[:, :count]


def _ranked(logits: Tensor, least: Tensor, count: int) -> Tensor:
    """As top_ids for one row; least: the smallest logit among the winners."""
    above = torch.nonzero(logits > least)[:, 0]
    equal = torch.nonzero(logits == least)[: count - len(above), 0]
    ids = torch.sort(torch.cat([above, equal])).values
    return ids[torch.sort(logits[ids], descending=True, stable=True).indices]


def alternatives(logits: Tensor, count: int, named: Sequence[int] = ()) -> TokenLogprobs:
    """The `count` most likely ids of logits [vocab] float32, then those of `named` that are not among them. Banned
    ids (-inf) are left out."""
    row = logits.unsqueeze(0)
    best = top_ids(row, count)[0].tolist()
    ids = [*best, *(token_id for token_id in dict.fromkeys(named) if token_id not in best)]
    if not ids:
        return TokenLogprobs((), ())
    logprobs = ops.logprobs_of(row, torch.tensor([ids], dtype=torch.int64))[0].tolist()
    told = [(token_id, logprob) for token_id, logprob in zip(ids, logprobs, strict=True) if logprob > -math.inf]
    return TokenLogprobs(tuple(token_id for token_id, _ in told), tuple(logprob for _, logprob in told))


def drawn_from(logits: Tensor, params: SamplingParams) -> Tensor:
    """What a row was drawn from: processed logits [vocab] float32 over the temperature, -inf where top-k, top-p or
    min-p leave an id out (docs/randomness.md). A greedy row's logits as they are."""
    if params.greedy:
        return logits
    row = logits.numpy()
    if not np.isfinite(row.max()):  # the draw fails and says so
        return logits
    temperature = min(params.temperature, float(np.finfo(np.float32).max))
    weight, value = weights(row, temperature)
    order = np.lexsort((np.arange(len(row)), -row))
    order = order[row[order] > -np.inf]
    if params.top_k > 0:
        order = order[: params.top_k]
    top_p = float(np.float32(params.top_p))
    if top_p < 1:
        mass = np.cumsum(weight[order])
        target = min(max(math.ceil(top_p * float(mass[-1])), 1), int(mass[-1]))
        order = order[: int(np.searchsorted(mass, target)) + 1]
    order = order[value[order] >= np.float32(params.min_p)]
    drawn = np.full_like(row, -np.inf)
    drawn[order] = (row[order] - row.max()) / np.float32(temperature)
    return torch.from_numpy(drawn)


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
        top = top_ids(logits, num_top)
        logprobs = ops.logprobs_of(logits, torch.cat([wanted.unsqueeze(1), top], dim=1))
        if not bool(torch.isfinite(logprobs).all()):
            return None
        ranks = (logits > logits.gather(1, wanted.unsqueeze(1))).sum(1, dtype=torch.int32) + 1
        told.logprobs.frombytes(logprobs[:, 0].contiguous().numpy().tobytes())
        told.ranks.frombytes(ranks.numpy().tobytes())
        told.top_ids.frombytes(top.to(torch.int32).contiguous().numpy().tobytes())
        told.top_logprobs.frombytes(logprobs[:, 1:].contiguous().numpy().tobytes())
    return told
