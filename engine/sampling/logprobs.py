"""Logprobs beside the draw: alternatives of output tokens, and what a model thought of its prompt.

Ranking everywhere: the larger logit first, of equal ones the lower id. Every row stands for itself; log-softmax is
of float32 logits with a float64 sum, whatever the model's dtype.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import ops
from engine.outputs import PromptLogprobs, TokenLogprobs
from engine.sampling.reference import WEIGHT_BITS, Float32s, Int64s, exponential, quantised
from engine.sampling_params import SamplingParams

SLICE = 64  # rows of logits that exist at a time: 64 x 150,000 ids are 38 MB
DIGIT_BITS = 16
PART = 16_384  # ids

Number = TypeVar("Number", np.float32, np.int64)


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
    min-p leave an id out (docs/randomness.md). A greedy row's processed logits as they are. Always a new tensor."""
    row = logits.numpy()
    top = row.max()
    if params.greedy or not np.isfinite(top):  # the draw of a row that is not finite fails and says so
        return logits.clone()
    with np.errstate(over="ignore"):
        drawn: Float32s = (row - top) / np.float32(min(params.temperature, float(np.finfo(np.float32).max)))
    if params.top_k <= 0 and np.float32(params.top_p) >= 1 and params.min_p <= 0:
        return torch.from_numpy(drawn)
    ids = _kept(row, drawn, params)
    cut = np.full_like(drawn, -np.inf)
    cut[ids] = drawn[ids]
    return torch.from_numpy(cut)


def _kept(row: Float32s, exponent: Float32s, params: SamplingParams) -> Int64s:
    """The ids of row [vocab] that top-k, top-p and min-p leave, ascending. exponent [vocab]: of their weights."""
    ids = np.flatnonzero(row > -np.inf)
    if 0 < params.top_k < len(ids):
        ids = ids[row[ids] >= np.partition(row, -params.top_k)[-params.top_k]]
        ids = ids[_leading(row[ids], np.ones(len(ids), dtype=np.int64), params.top_k)]
    top_p = float(np.float32(params.top_p))
    if top_p < 1:
        weight = _by_parts(lambda part: quantised(exponential(part)), exponent[ids])
        total = int(weight.sum())
        target = min(max(math.ceil(top_p * float(total)), 1), total)
        heavy = row[ids[weight >= (total - target) // len(ids)]]
        near = row[ids] >= heavy.min()  # the others weigh less than what may be left out, all together
        ids, weight = ids[near], weight[near]
        ids = ids[_leading(row[ids], weight, target)]
    if params.min_p > 0:
        ids = ids[_by_parts(exponential, exponent[ids]) >= np.float32(params.min_p)]
    return ids


def _leading(values: Float32s, weight: Int64s, target: int) -> npt.NDArray[np.bool_]:
    """Which of values [n] are the shortest prefix of the ranking (larger value first, then lower position) whose
    weight [n] reaches target, at most the sum. Nothing is sorted: the value's bits are read as two digits, and of
    each digit's bins only the one where the target falls is looked into. What two digits share is equal."""
    bits = (values + np.float32(0)).view(np.int32)  # -0 equals 0
    key = (bits ^ (~(bits >> 31) & 0x7FFF_FFFF)).view(np.uint32)  # ascends as values descend
    digit = key >> np.uint32(DIGIT_BITS)
    found, target = _bin_of(target, digit, weight)
    leading: npt.NDArray[np.bool_] = digit < found
    within = np.flatnonzero(digit == found)
    digit = key[within] & np.uint32(2**DIGIT_BITS - 1)
    found, target = _bin_of(target, digit, weight[within])
    leading[within[digit < found]] = True
    within = within[digit == found]
    leading[within[: int(np.searchsorted(np.cumsum(weight[within]), target)) + 1]] = True
    return leading


def _bin_of(target: int, digit: npt.NDArray[np.uint32], weight: Int64s) -> tuple[int, int]:
    """The digit at which the weight of it and all lower ones reaches target, and what it has to add itself."""
    half = WEIGHT_BITS // 2  # floats hold the sum of 2^22 weights of 20 bits exactly
    bins = digit.astype(np.int64)
    high, low = np.bincount(bins, weight >> half), np.bincount(bins, weight & (2**half - 1))
    mass = np.cumsum((high.astype(np.int64) << half) + low.astype(np.int64))
    found = int(np.searchsorted(mass, target))
    return found, target - (int(mass[found - 1]) if found else 0)


def _by_parts(function: Callable[[Float32s], npt.NDArray[Number]], values: Float32s) -> npt.NDArray[Number]:
    """function(values), element by element, on parts that stay in a processor's cache."""
    return np.concatenate([function(part) for part in np.split(values, range(PART, len(values), PART))])


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
