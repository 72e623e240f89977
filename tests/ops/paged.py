"""Ragged batches over a paged cache for the op tests, with the exact answer beside them.

Every slot that holds no key is NaN, every table entry that no query sees is -1, blocks lie in shuffled order, and
the output starts as NaN: whatever reads or leaves what it should not shows up as NaN or as an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine import ops
from engine.attention.reference import attend, first_key, visible_mask


@dataclass(frozen=True)
class Shape:
    """Heads and widths of one attention layer, and how it looks back."""

    kv_heads: int = 2
    group: int = 3
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5


class Batch:
    """Sequences of `lengths` keys, the last `queries` of which are computed in this step.

    `prefixes`: a sequence begins with so many tokens of an earlier one, in the same blocks: {sequence: (of, tokens)}.
    `kernels`: what computes, engine.ops or a LaunchedOps. `scales`: of keys and values in a cache of fp8, which only
    the latter has; None: the cache is of `dtype`.
    """

    def __init__(
        self,
        shape: Shape,
        lengths: list[int],
        queries: list[int],
        dtype: torch.dtype,
        seed: int = 0,
        prefixes: Mapping[int, tuple[int, int]] = MappingProxyType({}),
        kernels: Any = ops,
        scales: tuple[float, float] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def random(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator).to(dtype)

        self.shape, self.dtype, self.lengths, self.query_counts, self.kernels = shape, dtype, lengths, queries, kernels
        self.options: dict[str, Any] = {}  # further arguments of kernels.paged_attention
        rest: list[Tensor] = []  # further arguments of kernels.reshape_and_cache
        if scales is not None:
            rest = [torch.tensor([scale]) for scale in scales]
            self.options = dict(key_scale=rest[0], value_scale=rest[1])
        heads = shape.kv_heads * shape.group
        self.keys = [random(n, shape.kv_heads, shape.key_dim) for n in lengths]
        self.values = [random(n, shape.kv_heads, shape.value_dim) for n in lengths]
        self.queries = [random(n, heads, shape.key_dim) * 2 for n in queries]
        self.sinks = torch.randn(heads, generator=generator) if shape.sinks else None
        per_seq = [-(-n // shape.block_size) for n in lengths]
        num_blocks = sum(per_seq) + 2
        cached = dtype if scales is None else torch.float8_e4m3fn
        self.key_cache, self.value_cache = empty_caches(num_blocks, shape, cached)
        order = torch.randperm(num_blocks, generator=generator).tolist()
        self.blocks = [[order.pop() for _ in range(n)] for n in per_seq]
        for sequence, (source, tokens) in prefixes.items():
            for rows in (self.keys, self.values):
                rows[sequence][:tokens] = rows[source][:tokens]
            count = tokens // shape.block_size
            self.blocks[sequence][:count] = self.blocks[source][:count]
        for keys, values, blocks in zip(self.keys, self.values, self.blocks, strict=True):
            slots = self.slots(blocks, len(keys))
            kernels.reshape_and_cache(keys, values, self.key_cache, self.value_cache, slots, *rest)
        if scales is not None:  # exact() starts from what the cache can hold
            for scale, rows in zip(scales, (self.keys, self.values), strict=True):
                rows[:] = [((x.float() / scale).to(cached).double() * scale) for x in rows]

    def slots(self, blocks: list[int], length: int) -> Tensor:
        size = self.shape.block_size
        return torch.tensor([blocks[p // size] * size + p % size for p in range(length)], dtype=torch.int64)

    def table(self, sequence: int, length: int, num_queries: int, width: int) -> Tensor:
        """One row of block_tables; blocks before and after what the queries see are -1."""
        row = torch.full((width,), -1, dtype=torch.int32)
        if length and num_queries:
            position = torch.tensor([max(0, length - num_queries)])
            first = int(first_key(position, self.shape.window, self.shape.chunk)) // self.shape.block_size
            last = -(-length // self.shape.block_size)
            row[first:last] = torch.tensor(self.blocks[sequence][first:last], dtype=torch.int32)
        return row

    def attend(self, pieces: list[tuple[int, int, int]] | None = None) -> Tensor:
        """The op on `pieces` (sequence, first query, end query) as one batch; None: all queries of all sequences."""
        if pieces is None:
            pieces = [(s, 0, n) for s, n in enumerate(self.query_counts)]
        lengths = [self.lengths[s] - self.query_counts[s] + end for s, _, end in pieces]
        width = max(1, *(-(-n // self.shape.block_size) for n in self.lengths)) + 1
        tables = [self.table(s, n, end - begin, width) for (s, begin, end), n in zip(pieces, lengths, strict=True)]
        query = torch.cat([self.queries[s][begin:end] for s, begin, end in pieces])
        starts = torch.tensor([0] + [end - begin for _, begin, end in pieces]).cumsum(0).int()
        out = torch.full((*query.shape[:2], self.shape.value_dim), torch.nan, dtype=self.dtype)
        return self.kernels.paged_attention(
            query,
            self.key_cache,
            self.value_cache,
            torch.stack(tables),
            starts,
            torch.tensor(lengths, dtype=torch.int32),
            scale=self.shape.scale,
            window=self.shape.window,
            chunk=self.shape.chunk,
            softcap=self.shape.softcap,
            sinks=self.sinks,
            out=out,
            **self.options,
        )

    def exact(self) -> tuple[Tensor, Tensor]:
        """The answer in float64, and the same weights on |value|: the size that rounding errors scale with."""
        answers, sizes = [], []
        for keys, values, query in zip(self.keys, self.values, self.queries, strict=True):
            length, count = len(keys), len(query)
            if not length or not count:
                empty = torch.zeros(count, query.shape[1], self.shape.value_dim, dtype=torch.float64)
                answers.append(empty)
                sizes.append(empty)
                continue
            positions = torch.arange(length - count, length)
            visible = visible_mask(positions, 0, length, self.shape.window, self.shape.chunk)
            rest = (visible, self.shape.scale, self.shape.softcap, self.sinks)
            answers.append(attend(query, keys.double(), values.double(), *rest))
            sizes.append(attend(query, keys.double(), values.double().abs(), *rest))
        return torch.cat(answers), torch.cat(sizes)


def empty_caches(num_blocks: int, shape: Shape, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Key and value views of one NaN-filled buffer, K then V inside a block, as the engine allocates them."""
    split = shape.kv_heads * shape.block_size * shape.key_dim
    size = split + shape.kv_heads * shape.block_size * shape.value_dim
    buffer = torch.full((num_blocks, size * dtype.itemsize), 0xFF, dtype=torch.uint8).view(dtype)  # NaN in each
    return (
        buffer[:, :split].view(num_blocks, shape.kv_heads, shape.block_size, shape.key_dim),
        buffer[:, split:].view(num_blocks, shape.kv_heads, shape.block_size, shape.value_dim),
    )


def assert_close(got: Tensor, exact: Tensor, size: Tensor, float32_error: float = 4e-6) -> None:
    """bfloat16: probabilities and the output are each rounded to 8 bits, so the error is at most 2 * 2^-8 of `size`
    and a little for float32 work; float16: to 11. float32: what sums of up to 256 products lose in the scores,
    `float32_error`."""
    rounding = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 0.0}[got.dtype]
    bound = size * (float32_error + rounding) + 1e-6
    error = (got.double() - exact).abs()
    assert not got.isnan().any(), "NaN in the output"
    worst = int((error - bound).argmax())
    found, allowed = error.flatten()[worst], bound.flatten()[worst]
    assert (error <= bound).all(), f"error {found:.3g} over the bound {allowed:.3g} at {worst} of {tuple(got.shape)}"
