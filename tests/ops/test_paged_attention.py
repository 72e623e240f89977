"""Paged attention on every level: against float64, and the rule that a row's bits depend on that row alone."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ops
from tests.ops.paged import Batch, Shape, assert_close

LENGTHS = [1, 15, 16, 17, 255, 256, 257, 600]
DECODE = [1] * len(LENGTHS)
MIXED = [1, 15, 3, 1, 100, 256, 1, 77]

SHAPES = {
    "mha": Shape(kv_heads=3, group=1),
    "g3": Shape(),
    "g4-d128": Shape(group=4, key_dim=128, value_dim=128),
    "g7": Shape(kv_heads=1, group=7),
    "g8-d80": Shape(kv_heads=1, group=8, key_dim=80, value_dim=80),
    "d96": Shape(kv_heads=1, group=2, key_dim=96, value_dim=96),
    "d256": Shape(kv_heads=1, group=4, key_dim=256, value_dim=256),
    "tiny16": Shape(group=2, key_dim=16, value_dim=16),
    "tiny20": Shape(group=1, key_dim=20, value_dim=20),
    "tiny60": Shape(group=3, key_dim=60, value_dim=60),
    "two-widths": Shape(key_dim=96, value_dim=64),
    "narrow-keys": Shape(group=2, key_dim=40, value_dim=130),
    "many-heads": Shape(kv_heads=1, group=71, key_dim=16, value_dim=16),
    "blocks-of-32": Shape(block_size=32),
    "blocks-of-256": Shape(block_size=256),
    "window": Shape(window=50),
    "window-one-block": Shape(window=16),
    "window-past-split": Shape(window=300, group=1),
    "chunk": Shape(chunk=100),
    "softcap": Shape(softcap=5.0),
    "sinks": Shape(sinks=True),
    "everything": Shape(window=120, chunk=256, softcap=20.0, sinks=True, group=4),
}


@functools.cache
def batch_and_answer(name: str, queries: tuple[int, ...], dtype: torch.dtype) -> tuple[Batch, Tensor, Tensor]:
    """Made once for all levels, as the cache's layout is the same on each."""
    batch = Batch(SHAPES[name], LENGTHS, list(queries), dtype)
    return batch, *batch.exact()


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("queries", [DECODE, MIXED], ids=["decode", "mixed"])
def test_against_float64(level: str, dtype: torch.dtype, name: str, queries: list[int]) -> None:
    batch, exact, size = batch_and_answer(name, tuple(queries), dtype)
    assert_close(batch.attend(), exact, size)


def test_two_threads_share_one_long_sequence(level: str, dtype: torch.dtype) -> None:
    """Too few work items: its splits are computed apart and merged afterwards, to the same bits."""
    batch = Batch(Shape(), [3000], [3], dtype)
    alone = batch.attend()
    assert_close(alone, *batch.exact())
    torch.set_num_threads(2)
    assert same_bits(batch.attend(), alone)
    for row in range(3):
        assert same_bits(batch.attend([(0, row, row + 1)]), alone[row : row + 1])


INVARIANCE = {
    "g3": Shape(kv_heads=1),
    "g1-d80": Shape(kv_heads=1, group=1, key_dim=80, value_dim=80),
    "g7-tiny": Shape(kv_heads=1, group=7, key_dim=20, value_dim=60),
    "everything": replace(SHAPES["everything"], kv_heads=1),
}


@pytest.mark.parametrize("name", INVARIANCE)
def test_a_row_has_the_same_bits_however_it_is_batched(level: str, dtype: torch.dtype, name: str) -> None:
    """One prompt of 600 tokens in one chunk is the yardstick; every other way to compute its rows must equal it."""
    neighbours = [7 + 11 * i % 400 for i in range(63)]
    batch = Batch(INVARIANCE[name], [600, *neighbours], [600] + [min(n, 1 + n % 3) for n in neighbours], dtype)
    whole = batch.attend([(0, 0, 600)])
    others = [(s, 0, batch.query_counts[s]) for s in range(1, 64)]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for row in [0, 14, 15, 16, 17, 100, 254, 255, 256, 257, 400, 511, 512, 513, 599]:
            assert same_bits(batch.attend([(0, row, row + 1)]), whole[row : row + 1]), (threads, "alone", row)
        for step, begins in ((16, (0, 240, 256, 496, 584)), (100, (0, 200, 500)), (512, (0, 512))):
            for begin in begins:
                end = min(600, begin + step)
                assert same_bits(batch.attend([(0, begin, end)]), whole[begin:end]), (threads, step, begin)
        for begin, end in ((599, 600), (200, 300)):
            beside = batch.attend([*others[:30], (0, begin, end), *others[30:]])
            offset = sum(e - b for _, b, e in others[:30])
            assert same_bits(beside[offset : offset + end - begin], whole[begin:end]), (threads, "beside", begin)
            alone = torch.cat([batch.attend([piece]) for piece in others[:10]])
            assert same_bits(beside[: len(alone)], alone), (threads, "the neighbours", begin)


def same_bits(a: Tensor, b: Tensor) -> bool:
    integers = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.view(integers), b.view(integers))


SHARED_SHAPES = {
    "g3": Shape(kv_heads=1),
    "two-heads": Shape(kv_heads=2, group=1),
    "g4-d256": Shape(kv_heads=1, group=4, key_dim=256, value_dim=256),
    "d20": Shape(kv_heads=1, group=2, key_dim=20, value_dim=20),
    "blocks-of-96": Shape(kv_heads=1, block_size=96),
    "blocks-of-512": Shape(kv_heads=1, block_size=512),
    "many-heads": Shape(kv_heads=1, group=25, key_dim=16, value_dim=16),
    "window": Shape(kv_heads=1, window=600),
    "chunk": Shape(kv_heads=1, chunk=800),
    "everything": Shape(kv_heads=1, group=4, window=700, chunk=1024, softcap=20.0, sinks=True),
}
# length, queries, and what it begins with: (sequence, tokens)
SHARED_SEQUENCES: list[tuple[int, int, tuple[int, int] | None]] = [
    (1100, 1, None),
    (1030, 1, (0, 1024)),
    (1200, 1, (0, 1024)),
    (1029, 3, (0, 1024)),
    (1040, 20, (0, 1024)),  # computes part of what it shares
    (1000, 100, (0, 768)),  # a prompt's chunk beside decodes
    (700, 1, (0, 512)),  # leaves the others early
    (800, 1, (0, 96)),  # less than a split: no sharing
    (600, 1, None),
    (900, 2, (8, 512)),  # a second tree
    (900, 1, (9, 768)),
    (1100, 1, (0, 1088)),  # a fork: all but the last block
]


@pytest.mark.parametrize("name", SHARED_SHAPES)
def test_a_shared_prefix_changes_no_bit(level: str, dtype: torch.dtype, name: str) -> None:
    """Sequences whose blocks are the same beside one another, against each alone, where nothing is shared."""
    shape = SHARED_SHAPES[name]
    lengths, queries = [n for n, _, _ in SHARED_SEQUENCES], [q for _, q, _ in SHARED_SEQUENCES]
    size = shape.block_size
    prefixes = {s: (p[0], p[1] // size * size) for s, (_, _, p) in enumerate(SHARED_SEQUENCES) if p is not None}
    batch = Batch(shape, lengths, queries, dtype, prefixes=prefixes)
    whole = batch.attend()
    assert_close(whole, *batch.exact())
    alone = torch.cat([batch.attend([(s, 0, n)]) for s, n in enumerate(queries)])
    assert same_bits(whole, alone)
    torch.set_num_threads(2)
    assert same_bits(batch.attend(), alone)
    twins = [(s, 0, n) for s, n in enumerate(queries) if n < 4] * 3  # more rows than share one pass
    starts = torch.tensor([0, *queries]).cumsum(0).tolist()
    expected = torch.cat([alone[starts[s] : starts[s + 1]] for s, _, _ in twins])
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert same_bits(batch.attend(twins), expected), threads


def test_rows_without_keys_are_zeros(level: str, dtype: torch.dtype) -> None:
    """An empty sequence, a sequence that computes nothing, queries before the first key, rows of no sequence."""
    shape = Shape()
    batch = Batch(shape, [5, 40], [5, 1], dtype)
    tables = torch.tensor([[-1, -1, -1], [*batch.blocks[0], -1, -1], [*batch.blocks[1]], [*batch.blocks[0], -1, -1]])
    starts = torch.tensor([0, 2, 2, 3, 10], dtype=torch.int32)
    query = torch.cat([batch.queries[0][:2], batch.queries[1], batch.queries[0][[0, 0, 0, 1, 2, 3, 4, 4]]])
    out = torch.full((11, 6, 64), torch.nan, dtype=dtype)
    lengths = torch.tensor([0, 5, 40, 5], dtype=torch.int32)
    for sinks in (None, torch.ones(6)):
        got = ops.paged_attention(
            query, batch.key_cache, batch.value_cache, tables.int(), starts, lengths,
            scale=shape.scale, sinks=sinks, out=out,
        )  # fmt: skip
        zero = [0, 1, 3, 4, 10]  # the empty sequence; 7 queries over 5 keys: the first two see none; the padding row
        assert (got[zero] == 0).all()
        assert (got[[2, 5, 6, 7, 8, 9]] != 0).any(dim=2).all()


def test_not_causal_sees_later_keys(level: str, dtype: torch.dtype) -> None:
    batch = Batch(Shape(), [100], [40], dtype)
    table = torch.tensor([batch.blocks[0]], dtype=torch.int32)
    got = ops.paged_attention(
        batch.queries[0], batch.key_cache, batch.value_cache, table, torch.tensor([0, 40], dtype=torch.int32),
        torch.tensor([100], dtype=torch.int32), scale=0.125, causal=False,
    )  # fmt: skip
    keys, values = (x[0].double().repeat_interleave(3, 1) for x in (batch.keys, batch.values))
    weights = (torch.einsum("qhd,khd->hqk", batch.queries[0].double(), keys) * 0.125).softmax(-1)
    exact = torch.einsum("hqk,khd->qhd", weights, values)
    assert_close(got, exact, torch.einsum("hqk,khd->qhd", weights, values.abs()))


def test_strided_queries_and_outputs(level: str, dtype: torch.dtype) -> None:
    """Slices of a fused qkv tensor go in, and a slice of a wider output comes out, without copies."""
    batch = Batch(Shape(), [300], [20], dtype)
    fused = torch.full((20, 12, 64), torch.nan, dtype=dtype)
    fused[:, 2:8] = batch.queries[0]
    wide = torch.full((20, 8, 128), torch.nan, dtype=dtype)
    ops.paged_attention(
        fused[:, 2:8], batch.key_cache, batch.value_cache, torch.tensor([batch.blocks[0]], dtype=torch.int32),
        torch.tensor([0, 20], dtype=torch.int32), torch.tensor([300], dtype=torch.int32), scale=0.125,
        out=wide[:, 1:7, 64:],
    )  # fmt: skip
    assert torch.equal(wide[:, 1:7, 64:], batch.attend())
    assert wide[:, 0].isnan().all()
    assert wide[:, :, :64].isnan().all()


@pytest.mark.parametrize("factor", [300, 1e9])
def test_large_scores_stay_finite(level: str, dtype: torch.dtype, factor: float) -> None:
    """Scores of thousands and of ten billions: a split's maximum is subtracted before anything is rounded."""
    batch = Batch(Shape(), [600], [30], dtype)
    batch.queries[0] *= factor
    assert_close(batch.attend(), *batch.exact(), float32_error=1e-3)  # of scores near 3,000, in float32


def test_a_broken_row_stays_alone(level: str, dtype: torch.dtype) -> None:
    """A NaN query poisons its own head and no other."""
    batch = Batch(Shape(), [50, 60], [3, 1], dtype)
    clean = batch.attend()
    batch.queries[0][1, 4] = math.nan
    broken = batch.attend()
    assert broken[1, 4].isnan().all()
    clean[1, 4] = broken[1, 4] = 0
    assert torch.equal(broken, clean)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "query rank": ({"query": torch.zeros(2, 6)}, r"query: wanted \[num_tokens, num_query_heads, key_dim\].*\[2, 6\]"),
    "query width": ({"query": torch.zeros(2, 6, 32)}, r"query: wanted .*64\], got \[2, 6, 32\]"),
    "query dtype": ({"query": torch.zeros(2, 6, 64).half()}, "query: wanted float32 or bfloat16, got float16"),
    "heads": ({"query": torch.zeros(2, 5, 64)}, "query: wanted a multiple of 2 heads, got 5"),
    "cache dtype": ({"query": torch.zeros(2, 6, 64).bfloat16()}, "key_cache: wanted bfloat16, got float32"),
    "cache stride": ({"key_cache": torch.zeros(4, 2, 64, 16).mT}, "key_cache: wanted contiguous blocks"),
    "block size": (
        {"key_cache": torch.zeros(4, 2, 8, 64), "value_cache": torch.zeros(4, 2, 8, 64)},
        "key_cache: wanted a block size that is a multiple of 16, got 8",
    ),
    "value cache": ({"value_cache": torch.zeros(5, 2, 16, 64)}, r"value_cache: .*got \[5, 2, 16, 64\]"),
    "out": ({"out": torch.zeros(2, 6, 32)}, r"out: wanted .*\[2, 6, 64\], got \[2, 6, 32\]"),
    "table dtype": ({"block_tables": torch.zeros(1, 2, dtype=torch.int64)}, "block_tables: wanted int32, got int64"),
    "table rows": ({"block_tables": torch.zeros(3, 2, dtype=torch.int32)}, r"block_tables: .*got \[3, 2\]"),
    "block -1": ({"block_tables": torch.tensor([[0, -1]], dtype=torch.int32)}, "block_tables: .*got -1"),
    "block past the end": ({"block_tables": torch.tensor([[0, 4]], dtype=torch.int32)}, "block_tables: .*got 4"),
    "length": ({"seq_lens": torch.tensor([33], dtype=torch.int32)}, "seq_lens: wanted lengths from 0 to 32.*got 33"),
    "negative length": ({"seq_lens": torch.tensor([-1], dtype=torch.int32)}, "seq_lens: .*got -1"),
    "starts": (
        {"query_start_loc": torch.tensor([0, 3], dtype=torch.int32)},
        "query_start_loc: .*2 tokens, got 0 then 3",
    ),
    "first start": ({"query_start_loc": torch.tensor([1, 2], dtype=torch.int32)}, "query_start_loc: wanted 0 first"),
    "scale": ({"scale": 0.0}, "scale: wanted a positive number"),
    "softcap": ({"softcap": math.nan}, "softcap: wanted"),
    "window": ({"window": -3}, "window: wanted .*got -3"),
    "chunk": ({"chunk": -1}, "chunk: wanted .*got -1"),
    "sinks": ({"sinks": torch.zeros(5)}, r"sinks: wanted .*\[6\], got \[5\]"),
    "sinks dtype": ({"sinks": torch.zeros(6).double()}, "sinks: wanted float32, got float64"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_arguments_are_named(name: str) -> None:
    arguments: dict[str, Any] = {
        "query": torch.zeros(2, 6, 64),
        "key_cache": torch.zeros(4, 2, 16, 64),
        "value_cache": torch.zeros(4, 2, 16, 64),
        "block_tables": torch.zeros(1, 2, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
        "seq_lens": torch.tensor([20], dtype=torch.int32),
        "scale": 1.0,
    }
    ops.paged_attention(**arguments)
    changes, message = BAD[name]
    with pytest.raises(RuntimeError, match=r"pagemill\.paged_attention: " + message):
        ops.paged_attention(**{**arguments, **changes})


def test_odd_key_dim_is_refused_in_bfloat16_only(dtype: torch.dtype) -> None:
    shape = replace(Shape(), key_dim=21, value_dim=21)
    if dtype == torch.float32:
        batch = Batch(shape, [20], [3], dtype)
        assert_close(batch.attend(), *batch.exact())
    else:
        with pytest.raises(RuntimeError, match="even key_dim"):
            Batch(shape, [20], [3], dtype)
