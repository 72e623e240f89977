"""Weights of 8 or 4 bits in groups of 32, as `ops.linear_quant` multiplies them, and how floating point is rounded to
them. GGUF's own formats are the business of `gguf_quantised.py`.

A weight is scale * value + minimum, or scale * (value - zero) without minimums, zero being 128 or 8. Scales and
minimums are float16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from engine import ops
from engine.config import StartError

GROUP = 32
ZERO = {8: 128, 4: 8}
Bits = Literal[8, 4]
PANEL = 32  # output features that are packed together, gated 16 of either half
RUN = 1 << 17  # elements rounded at once: what float32 takes for them is small beside any model


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """What a packed weight's size depends on, beside its shape."""

    bits: Bits
    has_minimums: bool

    def packed_bytes(self, out_features: int, in_features: int, *, gated: bool = False) -> int:
        """Of ops.pack_linear_quant's result."""
        panels = -(-out_features // 2 // (PANEL // 2)) if gated else -(-out_features // PANEL)
        group_bytes = PANEL * ((4 if self.has_minimums else 2) + GROUP * self.bits // 8)
        return panels * -(-in_features // GROUP) * group_bytes


def join_formats(formats: Sequence[QuantFormat]) -> QuantFormat:
    """The narrowest one that holds weights of all of them exactly."""
    bits: Bits = 8 if any(each.bits == 8 for each in formats) else 4
    return QuantFormat(bits, any(each.has_minimums or each.bits != bits for each in formats))


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """values: [out_features, in_features] uint8, one per byte; scales, minimums: [out_features, groups] float16."""

    bits: Bits
    values: Tensor
    scales: Tensor
    minimums: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def format(self) -> QuantFormat:
        return QuantFormat(self.bits, self.minimums is not None)

    def with_rows(self, order: Callable[[Tensor], Tensor]) -> QuantisedWeight:
        """With its rows in another order: `order` is given [out_features, ...] and returns the same shape."""
        minimums = None if self.minimums is None else order(self.minimums)
        return replace(self, values=order(self.values), scales=order(self.scales), minimums=minimums)

    def check_finite(self) -> None:
        """Raises StartError."""
        for numbers in (self.scales, self.minimums):
            if numbers is not None and not bool(numbers.isfinite().all()):
                raise StartError("The model has weights that are not finite or too large to be quantised.")

    def widened(self, bits: Bits) -> QuantisedWeight:
        """The same weight with `bits`, no fewer than it has; exact."""
        return self if bits == self.bits else _widened(self, bits, with_minimums=True)

    def pack(self, *, gated: bool = False) -> Tensor:
        """As ops.linear_quant reads it. gated: the first half of the rows is a gate."""
        return ops.pack_linear_quant(self.values, self.scales, self.minimums, self.bits, gated=gated)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[out_features, in_features], computed in float32 and rounded once."""
        values = _grouped(self.values.float())
        if self.minimums is None:
            dense = (values - ZERO[self.bits]) * self.scales.float()[..., None]
        else:
            dense = values * self.scales.float()[..., None] + self.minimums.float()[..., None]
        return dense.flatten(1)[:, : self.shape[1]].to(dtype)


def join(parts: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """The rows of several weights as one, in the narrowest form that holds all of them exactly."""
    wanted = join_formats([part.format for part in parts])
    parts = [_widened(part, wanted.bits, with_minimums=wanted.has_minimums) for part in parts]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return QuantisedWeight(
        wanted.bits,
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if wanted.has_minimums else None,
    )


def _widened(part: QuantisedWeight, bits: Bits, *, with_minimums: bool) -> QuantisedWeight:
    """A zero value times a power of two is exact, unless it leaves float16's range; scales are far from that."""
    minimums = part.minimums
    if with_minimums and minimums is None:
        minimums = (part.scales.float() * -ZERO[part.bits]).half()
    return replace(part, bits=bits, minimums=minimums)


def quantise(weight: Tensor, bits: Bits) -> QuantisedWeight:
    """To the nearest value. weight: [out_features, in_features], floating point. 8 bits: scale is the group's largest
    magnitude / 127; 4 bits: scale and minimum from the group's largest and smallest value.

    Raises StartError for weights that float16 scales cannot hold."""
    return quantise_rows(weight.shape[0], weight.shape[1], bits, lambda first, end: weight[first:end].float())


def quantise_rows(
    out_features: int, in_features: int, bits: Bits, rows: Callable[[int, int], Tensor]
) -> QuantisedWeight:
    """`quantise` of a weight that need not be there as a whole: rows(first, end) -> [end - first, in_features],
    float32."""
    groups = -(-in_features // GROUP)
    values = torch.empty(out_features, in_features, dtype=torch.uint8)
    scales = torch.empty(out_features, groups, dtype=torch.float16)
    minimums = torch.empty_like(scales) if bits == 4 else None
    step = max(1, RUN // in_features)
    for first in range(0, out_features, step):
        run = slice(first, min(first + step, out_features))
        part = (_eight_bits if bits == 8 else _four_bits)(_grouped(rows(run.start, run.stop)))
        values[run], scales[run] = part.values.flatten(1)[:, :in_features], part.scales
        if minimums is not None and part.minimums is not None:
            minimums[run] = part.minimums
    quantised = QuantisedWeight(bits, values, scales, minimums)
    quantised.check_finite()
    return quantised


def _grouped(values: Tensor) -> Tensor:
    """[rows, n] -> [rows, ceil(n / 32), 32], the last value repeated: it changes no largest or smallest one."""
    missing = -values.shape[1] % GROUP
    if missing:
        values = functional.pad(values[None], (0, missing), mode="replicate")[0]
    return values.view(len(values), -1, GROUP)


def _eight_bits(groups: Tensor) -> QuantisedWeight:
    scales = _half_above(groups.abs().amax(2) / 127)
    values = (groups * _inverse(scales)[..., None]).round_().clamp_(-127, 127).add_(128).to(torch.uint8)
    return QuantisedWeight(8, values, scales, None)


def _four_bits(groups: Tensor) -> QuantisedWeight:
    smallest = groups.amin(2)
    minimums = smallest.half()
    scales = _half_above((groups.amax(2) - minimums.float()).clamp_(min=0) / 15)
    values = (groups - minimums.float()[..., None]).mul_(_inverse(scales)[..., None]).round_().clamp_(0, 15)
    return QuantisedWeight(4, values.to(torch.uint8), scales, minimums)


def _half_above(x: Tensor) -> Tensor:
    """x >= 0 as float16, rounded up: the largest value of a group must not be cut."""
    half = x.half()
    return torch.where(half.float() < x, (half.view(torch.int16) + 1).view(torch.float16), half)


def _inverse(scales: Tensor) -> Tensor:
    return torch.where(scales > 0, 1 / scales.float(), torch.zeros(()))
