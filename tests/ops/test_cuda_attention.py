"""Paged attention of csrc/cuda: the CPU's cases against float64, fp8 caches, and the rule that a row's bits depend on
that row alone: decode and prefill kernels, any workspace, any grid."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import LaunchedOps
from tests.ops.paged import Batch, Shape, assert_close
from tests.ops.test_paged_attention import DECODE, LENGTHS, MIXED, SHAPES, same_bits

HALF_TYPES = [torch.bfloat16, torch.float16]
FITTING = {name: shape for name, shape in SHAPES.items() if shape.key_dim % 8 == 0 and shape.value_dim % 8 == 0}
EDGES = [63, 64, 65, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 1300]


@pytest.fixture(params=HALF_TYPES, ids=["bf16", "f16"])
def half(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("queries", [DECODE, MIXED], ids=["decode", "mixed"])
def test_against_float64(launched: LaunchedOps, half: torch.dtype, name: str, queries: list[int]) -> None:
    batch = Batch(FITTING[name], LENGTHS, queries, half, kernels=launched)
    assert_close(batch.attend(), *batch.exact())


FP8_SHAPES = {
    "g3": Shape(),
    "d80": Shape(kv_heads=1, group=2, key_dim=80, value_dim=80),
    "d96": Shape(kv_heads=1, group=2, key_dim=96, value_dim=96),
    "d128": Shape(group=4, key_dim=128, value_dim=128),
    "d256": Shape(kv_heads=1, group=4, key_dim=256, value_dim=256),
    "everything": SHAPES["everything"],
}


@pytest.mark.parametrize("name", FP8_SHAPES)
def test_fp8_cache(launched: LaunchedOps, half: torch.dtype, name: str) -> None:
    """Keys and values that e4m3 can hold, times their scales: no further error than with a cache of 16 bits."""
    batch = Batch(FP8_SHAPES[name], LENGTHS, MIXED, half, kernels=launched, scales=(0.37, 1.9))
    assert_close(batch.attend(), *batch.exact(), float32_error=2e-5)  # the scores' factor has two more roundings


def test_fp8_scales_per_head(launched: LaunchedOps) -> None:
    batch = Batch(Shape(kv_heads=2), [300], [40], torch.bfloat16, kernels=launched, scales=(1.0, 1.0))
    scales = torch.tensor([0.5, 2.0]), torch.tensor([3.0, 0.25])
    batch.options = dict(key_scale=scales[0], value_scale=scales[1])
    got = batch.attend()
    batch.keys = [keys * scales[0].double()[:, None] for keys in batch.keys]
    batch.values = [values * scales[1].double()[:, None] for values in batch.values]
    assert_close(got, *batch.exact())


@pytest.mark.parametrize("window", [None, 5, 300], ids=["whole", "window-5", "window-300"])
@pytest.mark.parametrize("queries", [1, 3, 70], ids=["decode", "verify", "prefill"])
def test_lengths_around_tiles_and_splits(launched: LaunchedOps, window: int | None, queries: int) -> None:
    """Blocks before the window and after the end are -1, tails of blocks NaN."""
    shape = Shape(kv_heads=1, group=2, window=window)
    counts = [min(queries, n) for n in EDGES]
    batch = Batch(shape, EDGES, counts, torch.bfloat16, kernels=launched)
    batch.options = dict(max_query_len=queries)
    assert_close(batch.attend(), *batch.exact())


INVARIANCE = {
    "g3": Shape(kv_heads=1),
    "g1-d80": Shape(kv_heads=1, group=1, key_dim=80, value_dim=80),
    "g4-d128": Shape(kv_heads=1, group=4, key_dim=128, value_dim=128),
    "d256": Shape(kv_heads=1, group=2, key_dim=256, value_dim=256),
    "everything": replace(SHAPES["everything"], kv_heads=1),
}


@pytest.mark.parametrize("cached", ["half", "fp8"])
@pytest.mark.parametrize("name", INVARIANCE)
def test_a_row_has_the_same_bits_however_it_is_batched(launched: LaunchedOps, name: str, cached: str) -> None:
    """One prompt in one chunk is the yardstick (the prefill kernel, all splits in one block); decode, verify and
    chunks, alone and beside others, in any order, must equal it."""
    scales = (0.5, 2.0) if cached == "fp8" else None
    lengths = [600, 7, 300, 1100, 40]
    batch = Batch(INVARIANCE[name], lengths, [600, 2, 1, 1, 33], torch.bfloat16, kernels=launched, scales=scales)
    whole = batch.attend([(0, 0, 600)])
    for row in (0, 15, 16, 63, 64, 255, 256, 257, 511, 512, 599):
        assert same_bits(batch.attend([(0, row, row + 1)]), whole[row : row + 1]), ("alone", row)
    for begin, end in ((250, 260), (500, 516), (100, 200), (512, 600)):
        assert same_bits(batch.attend([(0, begin, end)]), whole[begin:end]), ("chunk", begin)
    others = [(s, 0, batch.query_counts[s]) for s in (1, 2, 3, 4)]
    alone = [batch.attend([piece]) for piece in others]
    for begin, end in ((599, 600), (200, 300)):
        for pieces, place in ((others, 2), (others[::-1], 0), (others[::-1], 4)):
            together = batch.attend([*pieces[:place], (0, begin, end), *pieces[place:]])
            outs = [alone[others.index(piece)] for piece in pieces]
            expected = torch.cat([*outs[:place], whole[begin:end], *outs[place:]])
            assert same_bits(together, expected), ("beside", begin, place)


@pytest.mark.parametrize("name", INVARIANCE)
def test_grid_and_workspace_change_no_bit(launched: LaunchedOps, name: str) -> None:
    """Room for no, some or all partial results; one block for everything or one per item."""
    batch = Batch(INVARIANCE[name], [1500, 2100, 30, 1700], [1, 4, 1, 2], torch.bfloat16, kernels=launched)
    expected = batch.attend()
    assert_close(expected, *batch.exact())
    for workspace_bytes in (16, 8 << 10, 40 << 10):
        for multiprocessors in (1, 50):
            batch.options = dict(workspace_bytes=workspace_bytes, multiprocessors=multiprocessors, max_query_len=4)
            assert same_bits(batch.attend(), expected), (workspace_bytes, multiprocessors)


def test_many_splits(launched: LaunchedOps) -> None:
    """More than the merge reads at once, by one and by some: 17 and 19 splits, beside one of exactly 16."""
    shape = Shape(kv_heads=1, group=2, key_dim=16, value_dim=16)
    batch = Batch(shape, [4200, 4096, 4700], [1, 1, 2], torch.bfloat16, kernels=launched)
    batch.options = dict(max_query_len=2, multiprocessors=8)
    assert_close(batch.attend(), *batch.exact())


def test_many_sequences(launched: LaunchedOps) -> None:
    """More than a block has threads, so the plan takes several rounds."""
    lengths = [1 + i * 37 % 90 for i in range(300)]
    shape = Shape(kv_heads=1, group=1, key_dim=16, value_dim=16)
    batch = Batch(shape, [*lengths, 1400], [1] * 301, torch.bfloat16, kernels=launched)
    batch.options = dict(max_query_len=1)
    assert_close(batch.attend(), *batch.exact())


def test_rows_without_keys_are_zeros(launched: LaunchedOps, half: torch.dtype) -> None:
    """An empty sequence, one that computes nothing, queries before the first key, rows of no sequence; the last kind
    beside a prompt long enough for the prefill kernel."""
    batch = Batch(Shape(), [5, 40], [5, 1], half, kernels=launched)
    tables = torch.tensor([[-1, -1, -1], [*batch.blocks[0], -1, -1], [*batch.blocks[1]], [*batch.blocks[0], -1, -1]])
    for before, extra in ((2, 0), (60, 1)):  # queries over 5 keys that stand before the first
        query = torch.cat([batch.queries[0][:2], batch.queries[1], *[batch.queries[0][:1]] * before, batch.queries[0]])
        query = torch.cat([query, *[query[:1]] * extra])
        starts = torch.tensor([0, 2, 2, 3, 3 + before + 5], dtype=torch.int32)
        lengths = torch.tensor([0, 5, 40, 5], dtype=torch.int32)
        for sinks in (None, torch.ones(6)):
            got = launched.paged_attention(
                query, batch.key_cache, batch.value_cache, tables.int(), starts, lengths, scale=0.125, sinks=sinks
            )
            assert (got[[0, 1, *range(3, 3 + before)]] == 0).all()
            assert (got[8 + before :] == 0).all()
            assert (got[[2, *range(3 + before, 8 + before)]] != 0).any(dim=2).all()


def test_not_causal_sees_later_keys(launched: LaunchedOps, half: torch.dtype) -> None:
    batch = Batch(Shape(), [100], [40], half, kernels=launched)
    got = launched.paged_attention(
        batch.queries[0], batch.key_cache, batch.value_cache, torch.tensor([batch.blocks[0]], dtype=torch.int32),
        torch.tensor([0, 40], dtype=torch.int32), torch.tensor([100], dtype=torch.int32), scale=0.125, causal=False,
    )  # fmt: skip
    keys, values = (x[0].double().repeat_interleave(3, 1) for x in (batch.keys, batch.values))
    weights = (torch.einsum("qhd,khd->hqk", batch.queries[0].double(), keys) * 0.125).softmax(-1)
    exact = torch.einsum("hqk,khd->qhd", weights, values)
    assert_close(got, exact, torch.einsum("hqk,khd->qhd", weights, values.abs()))


def test_strided_queries_and_outputs(launched: LaunchedOps, half: torch.dtype) -> None:
    batch = Batch(Shape(), [300], [20], half, kernels=launched)
    fused = torch.full((20, 12, 64), torch.nan, dtype=half)
    fused[:, 2:8] = batch.queries[0]
    wide = torch.full((20, 8, 128), torch.nan, dtype=half)
    launched.paged_attention(
        fused[:, 2:8], batch.key_cache, batch.value_cache, torch.tensor([batch.blocks[0]], dtype=torch.int32),
        torch.tensor([0, 20], dtype=torch.int32), torch.tensor([300], dtype=torch.int32), scale=0.125,
        out=wide[:, 1:7, 64:],
    )  # fmt: skip
    assert torch.equal(wide[:, 1:7, 64:], batch.attend())
    assert wide[:, 0].isnan().all()
    assert wide[:, :, :64].isnan().all()


@pytest.mark.parametrize("queries", [3, 40], ids=["decode", "prefill"])
def test_a_broken_row_stays_alone(launched: LaunchedOps, queries: int) -> None:
    batch = Batch(Shape(), [300, 60], [queries, 1], torch.bfloat16, kernels=launched)
    clean = batch.attend()
    batch.queries[0][1, 4] = math.nan
    broken = batch.attend()
    assert broken[1, 4].isnan().all()
    clean[1, 4] = broken[1, 4] = 0
    assert torch.equal(broken, clean)


def test_large_scores_stay_finite(launched: LaunchedOps) -> None:
    batch = Batch(Shape(), [600], [30], torch.bfloat16, kernels=launched)
    batch.queries[0] *= 300
    assert_close(batch.attend(), *batch.exact(), float32_error=1e-3)  # of scores near 3,000, in float32


REFUSED: dict[str, dict[str, Any]] = {
    "float32": dict(dtype=torch.float32),
    "head size": dict(dim=20),
    "too wide": dict(dim=264),
    "block size": dict(block_size=24),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_takes_is_refused(launched: LaunchedOps, name: str) -> None:
    wanted = dict(dtype=torch.bfloat16, dim=64, block_size=16) | REFUSED[name]
    cache = torch.zeros(2, 1, wanted["block_size"], wanted["dim"], dtype=wanted["dtype"])
    query = torch.zeros(1, 1, wanted["dim"], dtype=wanted["dtype"])
    one: Tensor = torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="paged_attention: error 1"):
        launched.paged_attention(query, cache, cache, one[:, None], starts, one, scale=1.0)
