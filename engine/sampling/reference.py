"""The draw of docs/randomness.md, step by step in numpy and Python integers: slow, and meant to be read.

Tests hold every compiled sampler to it, id for id. It ranks by sorting and adds by running sums; float32 appears
only where the definition says so, in the exponent and its exponential.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.sampling.philox import random_bits

WEIGHT_BITS = 40

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]

_f = np.float32
_LOG2E, _LN2_HIGH, _LN2_LOW = _f(1.44269504), _f(0.693359375), _f(-2.12194440e-4)
_SERIES = tuple(_f(1.0) / _f(math.factorial(k)) for k in range(8))  # of e^r, to r^7


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row wants its id chosen. top_k 0: no limit."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    greedy: bool = False
    seed_key: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Edits:
    """How one row is changed before its draw. allowed: the ids a mask leaves; None: no mask."""

    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    allowed: frozenset[int] | None = None


def edited(logits: Float32s, edits: Edits) -> Float32s:
    """A changed copy of one row [vocab]: penalties, then biases, then the mask, in float32. Where that leaves nothing
    of what the mask allows, the mask alone counts."""
    row = logits.copy()
    for i in {*edits.prompt_ids, *edits.output_ids}:
        row[i] = row[i] / _f(edits.repetition) if row[i] > 0 else row[i] * _f(edits.repetition)
    for i, count in Counter(edits.output_ids).items():
        row[i] -= _f(edits.presence) + _f(edits.frequency) * _f(count)
    for i, bias in edits.bias:
        row[i] += _f(bias)
    if edits.allowed is None:
        return row
    banned = np.ones(len(row), dtype=np.bool_)
    banned[[i for i in edits.allowed if i < len(row)]] = False
    row[banned] = -np.inf
    return row if row.max() > -np.inf else np.where(banned, _f(-np.inf), logits)


def exponential(d: Float32s) -> Float32s:
    """e^d for d <= 0 in float32, every multiplication and addition rounded by itself; d below -30 counts as -30."""
    d = np.maximum(d, _f(-30))
    whole = np.rint(d * _LOG2E)
    r = (d - whole * _LN2_HIGH) - whole * _LN2_LOW
    total = np.full_like(r, _SERIES[7])
    for coefficient in _SERIES[6::-1]:
        total = total * r + coefficient
    result: Float32s = np.ldexp(total, whole.astype(np.int32)).astype(np.float32)
    return result


def weights(logits: Float32s, temperature: float) -> tuple[Int64s, Float32s]:
    """Per id: the weight, an integer in [0, 2^40], and the float32 it was rounded from (what min-p looks at)."""
    with np.errstate(over="ignore"):
        exponent = (logits - logits.max()) / _f(temperature)
    value = exponential(exponent)
    return quantised(value), value


def quantised(value: Float32s) -> Int64s:
    """The weight of e^d in [0, 1], rounded half to even; the product is exact, for 2^40 moves only the exponent."""
    weight: Int64s = np.rint(value * _f(2**WEIGHT_BITS)).astype(np.int64)
    return weight


def candidates(logits: Float32s, draw: Draw) -> list[int]:
    """The ids that top-k, top-p and min-p leave, in ranking order: logit descending, then id ascending."""
    weight, value = weights(logits, draw.temperature)
    ranking = [int(i) for i in np.lexsort((np.arange(len(logits)), -logits)) if logits[i] > -np.inf]
    if draw.top_k > 0:
        ranking = ranking[: draw.top_k]
    top_p = float(_f(draw.top_p))
    if top_p < 1:
        total = sum(int(weight[i]) for i in ranking)
        target = min(max(math.ceil(top_p * float(total)), 1), total)
        mass = 0
        for count, i in enumerate(ranking, start=1):
            mass += int(weight[i])
            if mass >= target:
                ranking = ranking[:count]
                break
    return [i for i in ranking if value[i] >= _f(draw.min_p)]


def sample(logits: Float32s, draw: Draw) -> int | None:
    """The id drawn from one row [vocab] of float32 logits; None if it holds NaN, +inf or nothing finite."""
    if np.isnan(logits).any() or not np.isfinite(logits.max()):
        return None
    if draw.greedy:
        return int(np.argmax(logits))
    weight, _ = weights(logits, draw.temperature)
    kept = sorted(candidates(logits, draw))
    total = sum(int(weight[i]) for i in kept)
    place = random_bits(draw.seed_key, draw.position) * total >> 53  # floor(u * total)
    mass = 0
    for i in kept:
        mass += int(weight[i])
        if mass > place:
            return i
    raise AssertionError("the place of a draw lies below the total weight")
