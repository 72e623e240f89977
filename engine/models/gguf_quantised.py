"""A GGUF file's quantised tensors in their own precision: the integers of its blocks as they are.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 have a float16 scale (and minimum) per 32 weights, as ours have: nothing is lost.
Q4_K and Q5_K derive scales and minimums from two levels; their product is rounded to float16, which moves it by 2^-12
of itself at most, where bfloat16 weights move by 2^-9. What has other blocks (Q6_K, Q3_K, ...) is rounded to 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine.models.dequantize import (
    PLAIN,
    RUN,
    dequantize,
    fifth_bits,
    half_at,
    low_high,
    nibbles,
    owned,
    q5_k_integers,
    scales_and_offsets,
)
from engine.models.quantised import GROUP, ZERO, Bits, QuantFormat, QuantisedWeight, quantise_rows

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Of n blocks: values [n, block_size] uint8; scales and minimums [n, block_size / 32], finite float16 or None."""


def own_precision(data: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> QuantisedWeight | None:
    """`data` [num_bytes] uint8 of one matrix -> the smallest weight that holds it, nearly or without loss. None for
    floating point. Raises GgufError for a format nobody can read, StartError for infinite scales."""
    if kind in PLAIN:
        return None
    if kind not in _BLOCKS:
        return _rounded(data, kind, shape)
    bits, _, split = _BLOCKS[kind]
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    values = torch.empty(len(blocks), block_size, dtype=torch.uint8)
    scales = torch.empty(len(blocks), block_size // GROUP, dtype=torch.float16)
    minimums: Tensor | None = None
    step = RUN // block_size
    for first in range(0, len(blocks), step):
        run = slice(first, first + step)
        values[run], scales[run], lowest = split(owned(blocks[run]))
        if lowest is not None:
            minimums = torch.empty_like(scales) if minimums is None else minimums
            minimums[run] = lowest
    rows = shape[0]
    weight = QuantisedWeight(
        bits, values.view(rows, -1), scales.view(rows, -1), None if minimums is None else minimums.view(rows, -1)
    )
    weight.check_finite()
    return weight


def own_format(kind: GGMLQuantizationType) -> QuantFormat | None:
    """That of own_precision's result."""
    if kind in PLAIN:
        return None
    if kind not in _BLOCKS:
        return QuantFormat(8, has_minimums=False)
    bits, has_minimums, _ = _BLOCKS[kind]
    return QuantFormat(bits, has_minimums)


def _rounded(data: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...]) -> QuantisedWeight:
    by_row = data.reshape(shape[0], -1)

    def rows(first: int, end: int) -> Tensor:
        return dequantize(by_row[first:end].reshape(-1), kind, (end - first, shape[1]), torch.float32)

    return quantise_rows(shape[0], shape[1], 8, rows)


def _half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as it is: [n, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16)


def _q4_0(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    """The format's zero is 16."""
    return (nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)) + (ZERO[8] - 16), _half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    return nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    """The format's integers are signed."""
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _q4_k(blocks: Tensor) -> Parts:
    return low_high(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Tensor) -> Parts:
    return q5_k_integers(blocks), *_k_scales(blocks)


def _k_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    scales, offsets = scales_and_offsets(blocks[:, 4:16])
    return (scales * half_at(blocks, 0)).half(), (offsets * -half_at(blocks, 2)).half()


Split = Callable[[Tensor], Parts]
_BLOCKS: dict[GGMLQuantizationType, tuple[Bits, bool, Split]] = {  # bits, has minimums
    GGMLQuantizationType.Q4_0: (4, False, _q4_0),
    GGMLQuantizationType.Q4_1: (4, True, _q4_1),
    GGMLQuantizationType.Q4_K: (4, True, _q4_k),
    GGMLQuantizationType.Q5_0: (8, False, _q5_0),
    GGMLQuantizationType.Q5_1: (8, True, _q5_1),
    GGMLQuantizationType.Q5_K: (8, True, _q5_k),
    GGMLQuantizationType.Q8_0: (8, False, _q8_0),
}
