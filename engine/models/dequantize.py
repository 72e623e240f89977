"""GGUF's block formats to floating point: every format of the `gguf` package, the plain ones by a faster route.

A quantised row is a run of blocks: scales and offsets of a few bits or float16, and 32 or 256 small integers. The
formats that files are mostly made of are a few tensor operations over short runs of blocks (three times the speed of
the package's numpy, and bit for bit its result: float32, one multiplication, one addition). All others go through
`gguf.quants`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize as package_dequantize
from torch import Tensor

from engine.models.gguf import GgufError

# Elements handled at once: the values stay in the second-level cache, and torch splits no operation of this size
# over its threads, which would cost more than it gains and a lot more on a busy machine.
RUN = 1 << 15
_PACKAGE_RUN = 1 << 18  # the package's many small numpy calls want longer runs

PLAIN = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
    GGMLQuantizationType.F64: torch.float64,
}


def dequantize(data: np.ndarray, kind: GGMLQuantizationType, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """`data` [num_bytes] uint8 of one tensor -> [*shape] dtype, in memory of its own. Values are computed in float32
    and rounded once. Raises GgufError for a format nobody can read."""
    out = torch.empty(shape, dtype=dtype)
    flat = out.view(-1)
    for start, values in _runs(data, kind):
        flat[start : start + values.numel()].copy_(values)
    return out


def _runs(data: np.ndarray, kind: GGMLQuantizationType) -> Iterator[tuple[int, Tensor]]:
    """(index of the first element, values) for run after run, in order."""
    if kind in PLAIN:
        yield 0, owned(data).view(PLAIN[kind])
        return
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = data.reshape(-1, block_bytes)
    convert = _BLOCKS.get(kind)
    step = (RUN if convert else _PACKAGE_RUN) // block_size
    convert = convert or _by_package(kind)
    for first in range(0, len(blocks), step):
        yield first * block_size, convert(owned(blocks[first : first + step])).view(-1)


def owned(array: np.ndarray) -> Tensor:
    """A copy that torch owns: the source is a read-only view of the mapped file."""
    return torch.from_numpy(array.copy())


def _by_package(kind: GGMLQuantizationType) -> Callable[[Tensor], Tensor]:
    def convert(blocks: Tensor) -> Tensor:
        try:
            return torch.from_numpy(package_dequantize(blocks.numpy(), kind))
        except NotImplementedError as error:
            raise GgufError(f"Weights of the GGUF type {kind.name} cannot be read.") from error

    return convert


def half_at(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: [n, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[n, 16] uint8 -> [n, 32] uint8: the low halves first, then the high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=1)


def fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """The 32 bits in the 4 bytes at `at`, each worth 16: [n, 32] uint8."""
    shifts = torch.arange(8, dtype=torch.uint8)
    bits = (blocks[:, at : at + 4, None] >> shifts) & 1
    return (bits << 4).view(-1, 32)


def _q4_0(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 2:]).float() - 8.0).mul_(half_at(blocks, 0))


def _q4_1(blocks: Tensor) -> Tensor:
    return nibbles(blocks[:, 4:]).float().mul_(half_at(blocks, 0)).add_(half_at(blocks, 2))


def _q5_0(blocks: Tensor) -> Tensor:
    return ((nibbles(blocks[:, 6:]) | fifth_bits(blocks, 2)).float() - 16.0).mul_(half_at(blocks, 0))


def _q5_1(blocks: Tensor) -> Tensor:
    return (nibbles(blocks[:, 8:]) | fifth_bits(blocks, 4)).float().mul_(half_at(blocks, 0)).add_(half_at(blocks, 2))


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(half_at(blocks, 0))


def scales_and_offsets(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight offsets of 6 bits in 12 bytes: [n, 12] uint8 -> 2 x [n, 8] float32. The first four of
    each lie in the low bits of a byte; the last four take 4 bits of the third group and the others' two top bits."""
    scale, offset, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((scale & 63, (rest & 15) | ((scale >> 2) & 48)), dim=1)
    offsets = torch.cat((offset & 63, (rest >> 4) | ((offset >> 2) & 48)), dim=1)
    return scales.float(), offsets.float()


def low_high(packed: Tensor, width: int) -> Tensor:
    """[n, bytes] -> [n, 2 * bytes] uint8: of every `width` bytes first the low halves, then the high ones."""
    groups = packed.reshape(len(packed), -1, width)
    return torch.stack((groups & 15, groups >> 4), dim=2).view(len(packed), -1)


def _k_values(blocks: Tensor, integers: Tensor) -> Tensor:
    """Eight sub-blocks of 32 with their own scale and offset: [n, 256] uint8 -> [n, 256] float32."""
    scales, offsets = scales_and_offsets(blocks[:, 4:16])
    values = integers.float().view(-1, 8, 32)
    values.mul_((half_at(blocks, 0) * scales)[:, :, None]).sub_((half_at(blocks, 2) * offsets)[:, :, None])
    return values


def _q4_k(blocks: Tensor) -> Tensor:
    return _k_values(blocks, low_high(blocks[:, 16:], 32))


def _q5_k(blocks: Tensor) -> Tensor:
    return _k_values(blocks, q5_k_integers(blocks))


def q5_k_integers(blocks: Tensor) -> Tensor:
    """[n, 256] uint8, from 0 to 31."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = ((blocks[:, 16:48, None].transpose(1, 2) >> shifts) & 1) << 4
    return low_high(blocks[:, 48:], 32) | fifth.reshape(-1, 256)


def _q6_k(blocks: Tensor) -> Tensor:
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = ((blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4
    integers = low_high(blocks[:, :128], 64) | upper.view(-1, 256)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float() * half_at(blocks, 208)
    return (integers.float() - 32.0).view(-1, 16, 16).mul_(scales[:, :, None])


_BLOCKS: dict[GGMLQuantizationType, Callable[[Tensor], Tensor]] = {
    GGMLQuantizationType.Q4_0: _q4_0,
    GGMLQuantizationType.Q4_1: _q4_1,
    GGMLQuantizationType.Q5_0: _q5_0,
    GGMLQuantizationType.Q5_1: _q5_1,
    GGMLQuantizationType.Q8_0: _q8_0,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
