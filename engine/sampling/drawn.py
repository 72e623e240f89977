"""What a token was drawn from, step by step in torch on any device: docs/randomness.md to the bit.

For the rows that ask for processed logprobs, where the sampler itself only tells ids: it sorts, which the sampler does
not. Weights are integers, so sums are exact in any order; float32 operations are rounded one by one, as eager torch
does them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

WEIGHT = 2.0**40
LOG2E, LN2_HIGH, LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
SLICE = 32  # rows at a time: each takes some 80 bytes per id meanwhile
SERIES = tuple(1.0 / math.factorial(k) for k in range(8))  # of e^r, to r^7


def drawn_from(
    logits: Tensor,  # [rows, vocab], float32, as they are drawn from: edited
    temperature: Tensor,  # this and the next four as in ops.sample
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    greedy: Tensor,
) -> Tensor:
    """As ops.Drawn.logits, [rows, vocab]; of a row that no id is drawn from it may be anything."""
    parts = (torch.split(each, SLICE) for each in (logits, temperature, top_k, top_p, min_p, greedy))
    return torch.cat([_drawn_from(*part) for part in zip(*parts, strict=True)])


def _drawn_from(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, greedy: Tensor
) -> Tensor:
    exponent = (logits - logits.amax(1, keepdim=True)) / temperature[:, None]
    value = exponential(exponent)
    members = logits > -torch.inf
    weight = torch.where(members, torch.round(value * WEIGHT), 0.0).to(torch.int64)
    ranking = torch.sort(logits + 0.0, dim=1, descending=True, stable=True).indices  # + 0: -0 is not below 0
    rank = torch.empty_like(ranking).scatter_(1, ranking, _places(ranking))
    kept = members & ((top_k[:, None] <= 0) | (rank < top_k[:, None]))
    ranked = torch.where(kept, weight, 0).gather(1, ranking)
    before = ranked.cumsum(1) - ranked
    total = ranked.sum(1)
    target = torch.ceil(top_p.double() * total.double()).to(torch.int64).clamp(min=1).minimum(total)
    in_nucleus = (before < target[:, None]) | (top_p[:, None] >= 1)
    kept &= torch.empty_like(kept).scatter_(1, ranking, in_nucleus) & (value >= min_p[:, None])
    drawn = torch.where(kept, exponent, -torch.inf)
    return torch.where(greedy[:, None] != 0, logits, drawn)


def exponential(d: Tensor) -> Tensor:
    """e^d for d <= 0, float32; d below -30 counts as -30."""
    d = d.clamp(min=-30.0)
    whole = torch.round(d * _single(LOG2E))
    r = (d - whole * _single(LN2_HIGH)) - whole * _single(LN2_LOW)
    total = torch.full_like(r, _single(SERIES[7]))
    for coefficient in SERIES[6::-1]:
        total = total * r + _single(coefficient)
    return total * ((whole.to(torch.int32) + 127) << 23).view(torch.float32)


def _single(number: float) -> float:
    """Rounded to float32: torch may keep a scalar in more digits."""
    return float(torch.tensor(number, dtype=torch.float32))


def _places(ranking: Tensor) -> Tensor:
    return torch.arange(ranking.shape[1], device=ranking.device).expand_as(ranking)
