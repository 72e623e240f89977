"""What LoRA adapters add to a linear layer's product: rows of one batch may each have another adapter, or none.

An adapter's part of a weight is B A, two matrices of a small rank; x W^T + (x A^T) B^T is computed without ever making
it. A step's rows stand adapter by adapter, so that each adapter's are one slice: two products over it, nothing
gathered. Both are `ops.linear`, so a row's bits depend on that row and its adapter alone; rows without an adapter keep
those of the plain product, which is not yet rounded when the sum is made. Knows no names and no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from engine import ops

PANEL = 32  # rows of a packed weight that lie together; of a gated one half are the gate's


class AdapterSpan(NamedTuple):
    """Tokens [start, stop) of a forward have this adapter, counted from 1."""

    adapter: int
    start: int
    stop: int


Spans = tuple[AdapterSpan, ...]  # in ascending order, disjoint; tokens in none have no adapter


@dataclass(frozen=True, slots=True)
class LowRank:
    """b @ a is added to a weight [out_features, in_features]; an adapter's scale is in b."""

    a: Tensor  # [rank, in_features]
    b: Tensor  # [out_features, rank]

    def with_rows(self, order: Tensor) -> LowRank:
        """order: of out_features, int64; what lies past the end is a row of zeros."""
        return LowRank(self.a, torch.cat([self.b, self.b.new_zeros(1, self.b.shape[1])])[order])


class Site(NamedTuple):
    """A product of one or several layers' rows, one after another, to which adapters may add."""

    paths: tuple[str, ...]  # the layers' names in transformers' model
    rows: tuple[int, ...]  # out_features of each
    in_features: int
    adapt: Callable[[int, LowRank], None]  # adapter, what it adds to all rows


def joined(site: Site, parts: Sequence[LowRank | None]) -> LowRank:
    """Of all rows of a site: the parts' ranks side by side, each for its own rows, the rest zeros. A zero adds
    nothing, so every row is what its own part alone gives it."""
    known = [part for part in parts if part is not None]
    b = known[0].b.new_zeros(sum(site.rows), sum(part.b.shape[1] for part in known))
    row = column = 0
    for num_rows, part in zip(site.rows, parts, strict=True):
        if part is not None:
            b[row : row + num_rows, column : column + part.b.shape[1]] = part.b
            column += part.b.shape[1]
        row += num_rows
    return LowRank(torch.cat([part.a for part in known]), b)


def panel_order(num_rows: int) -> Tensor:
    """Of a gated weight of 2 * num_rows rows, which of them its panels hold one after another; past the end: padding.
    [a multiple of PANEL], int64."""
    half = PANEL // 2
    row = torch.arange(-(-num_rows // half) * half).view(-1, 1, half)
    order = torch.cat([row, row + num_rows], 1)
    return torch.where(row < num_rows, order, 2 * num_rows).flatten()


class PackedLowRank:
    """A LowRank as ops.linear reads it."""

    def __init__(self, low_rank: LowRank) -> None:
        self.rank, self._out_features = len(low_rank.a), len(low_rank.b)
        self.a, self.b = ops.pack_linear(low_rank.a), ops.pack_linear(low_rank.b)
        self.num_bytes = self.a.nbytes + self.b.nbytes

    def added(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [num_rows, in_features]; y: [num_rows, out_features], float32. A new tensor like y."""
        inner = ops.linear(x, self.a, None, self.rank)
        return ops.linear(inner, self.b, None, self._out_features, out_dtype=torch.float32, residual=y)


class Deltas:
    """What every adapter adds to one product."""

    def __init__(self) -> None:
        self._of: dict[int, PackedLowRank] = {}
        self.num_bytes = 0  # of all; asked for after each, of which there may be hundreds

    def put(self, adapter: int, low_rank: LowRank) -> None:
        """Once for each adapter."""
        self._of[adapter] = delta = PackedLowRank(low_rank)
        self.num_bytes += delta.num_bytes

    def of(self, adapter: int) -> PackedLowRank | None:
        return self._of.get(adapter)

    def change(self, spans: Spans) -> bool:
        """False if the product is as without adapters."""
        return any(span.adapter in self._of for span in spans)

    def added(self, x: Tensor, y: Tensor, spans: Spans) -> Tensor:
        """x: [num_tokens, in_features]; y: [num_tokens, out_features], float32, is taken."""
        for adapter, start, stop in spans:
            delta = self._of.get(adapter)
            if delta is None:
                continue
            if stop - start == len(x):
                return delta.added(x, y)
            rows = y[start:stop]
            rows.copy_(delta.added(x[start:stop], rows))
        return y
