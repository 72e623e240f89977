"""Cache writes on every level, and whole-block copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine import ops
from tests.ops.kernels import LaunchedOps
from tests.ops.paged import Shape, empty_caches

SHAPES = [Shape(), Shape(key_dim=80, value_dim=20, kv_heads=3), Shape(block_size=64, key_dim=16, value_dim=256)]


def read_own_values(kernels: Any, shape: Shape, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
    """What a query that sees only the key at each slot gets: that slot's value, exactly. [num_tokens, heads, dim]

    On CUDA a cache's inside is known: rows in the order of tokens."""
    if isinstance(kernels, LaunchedOps):
        return values[slots // shape.block_size, :, slots % shape.block_size]
    num_tokens = len(slots)
    blocks = (slots // shape.block_size).int().view(-1, 1)
    # one sequence per token, placed so that the token is the last its sequence sees, with a window of itself
    return ops.paged_attention(
        torch.ones(num_tokens, shape.kv_heads, shape.key_dim, dtype=keys.dtype),
        keys,
        values,
        blocks,
        torch.arange(num_tokens + 1, dtype=torch.int32),
        (slots % shape.block_size + 1).int(),
        scale=1.0,
        window=1,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=["d64", "two-widths", "blocks-of-64"])
def test_written_values_read_back_exactly(kernels: Any, dtype: torch.dtype, shape: Shape, threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    key_cache, value_cache = empty_caches(9, shape, dtype)
    key_cache.zero_()  # the slots before a token of its sequence are written in life
    value_cache.zero_()
    tokens = 70
    slots = torch.randperm(9 * shape.block_size, generator=generator)[:tokens]
    fused = torch.randn(tokens, shape.kv_heads, 1000, generator=generator).to(dtype)
    keys, values = fused[:, :, 7 : 7 + shape.key_dim], fused[:, :, 500 : 500 + shape.value_dim]  # strided rows
    kernels.reshape_and_cache(keys, values, key_cache, value_cache, slots)
    assert torch.equal(read_own_values(kernels, shape, key_cache, value_cache, slots), values)
    kernels.reshape_and_cache(keys[:5], values[:5] * 2, key_cache, value_cache, slots[:5])  # overwriting
    assert torch.equal(read_own_values(kernels, shape, key_cache, value_cache, slots[:5]), values[:5] * 2)
    assert torch.equal(read_own_values(kernels, shape, key_cache, value_cache, slots[5:]), values[5:])
    if isinstance(kernels, LaunchedOps):
        assert torch.equal(key_cache[slots // shape.block_size, :, slots % shape.block_size], keys)


def test_each_write_touches_its_slot_only(kernels: Any, dtype: torch.dtype) -> None:
    shape = Shape()
    key_cache, value_cache = empty_caches(3, shape, dtype)
    rows = torch.ones(2, shape.kv_heads, 64, dtype=dtype)
    kernels.reshape_and_cache(rows, rows, key_cache, value_cache, torch.tensor([-1, 16 + 5]))
    for cache in (key_cache, value_cache):
        written = ~cache.isnan()
        assert written[1].sum() == shape.kv_heads * 64
        assert not written[0].any()
        assert not written[2].any()


def test_levels_share_one_layout(dtype: torch.dtype) -> None:
    shape = Shape(key_dim=96, value_dim=40)
    rows = torch.randn(16, shape.kv_heads, 136, generator=torch.Generator().manual_seed(2)).to(dtype)
    caches = []
    for name in ops.isa_levels():
        ops.set_isa(name)
        pair = empty_caches(1, shape, dtype)
        ops.reshape_and_cache(rows[:, :, :96], rows[:, :, 96:], *pair, torch.arange(16))
        caches.append(pair)
    ops.set_isa("auto")
    assert all(torch.equal(a, b) for pair in caches[1:] for a, b in zip(pair, caches[0], strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(3, 2, 64)}, r"value: wanted .*\[3, 2, 64\], got \[4, 2, 64\]"),
        ({"key": torch.zeros(4, 2, 32)}, r"key: wanted .*64\], got \[4, 2, 32\]"),
        ({"value": torch.zeros(4, 2, 64).bfloat16()}, "value: wanted float32, got bfloat16"),
        ({"key": torch.zeros(4, 2, 64).double()}, "key: wanted float32 or bfloat16, got float64"),
        ({"slot_mapping": torch.zeros(4, dtype=torch.int32)}, "slot_mapping: wanted int64, got int32"),
        ({"slot_mapping": torch.tensor([0, 1, 2, 48])}, "slot_mapping: wanted slots below 48, got 48 at token 3"),
        ({"slot_mapping": torch.zeros(5, dtype=torch.int64)}, r"slot_mapping: .*\[4\], got \[5\]"),
        ({"key_cache": torch.zeros(3, 2, 64)}, r"key_cache: wanted \[num_blocks.*got \[3, 2, 64\]"),
        ({"key_cache": torch.zeros(3, 2, 16, 128)[..., ::2]}, "key_cache: wanted contiguous blocks"),
    ],
)
def test_wrong_arguments_are_named(change: dict[str, Tensor], message: str) -> None:
    arguments = {
        "key": torch.zeros(4, 2, 64),
        "value": torch.zeros(4, 2, 64),
        "key_cache": torch.zeros(3, 2, 16, 64),
        "value_cache": torch.zeros(3, 2, 16, 64),
        "slot_mapping": torch.arange(4),
    }
    ops.reshape_and_cache(**arguments)
    with pytest.raises(RuntimeError, match=r"pagemill\.reshape_and_cache: " + message):
        ops.reshape_and_cache(**{**arguments, **change})


def layers() -> list[Tensor]:
    """Three layers of 8 blocks; sizes and dtypes differ."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(8, 2, 3, 16, 64, generator=generator),
        torch.randn(8, 5, generator=generator).bfloat16(),
        torch.randint(0, 256, (8, 100_000), generator=generator, dtype=torch.uint8),
    ]


def test_copy_blocks_copies_every_layer(kernels: Any, threads: int) -> None:
    caches = layers()
    before = [cache.clone() for cache in caches]
    kernels.copy_blocks(caches, torch.tensor([[1, 2], [1, 3], [5, 0]]))
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[5, 1, 1, 1, 4, 5, 6, 7]])


def test_gather_and_scatter_carry_a_block_elsewhere(kernels: Any, threads: int) -> None:
    caches = layers()
    before = [cache.clone() for cache in caches]
    size = sum(cache[0].numel() * cache.element_size() for cache in caches)
    staging = torch.zeros(2, size, dtype=torch.uint8)
    kernels.gather_blocks(caches, torch.tensor([4, 6]), staging)
    expected = torch.cat([cache[4].flatten().view(torch.uint8) for cache in caches])
    assert torch.equal(staging[0], expected)
    kernels.scatter_blocks(caches, torch.tensor([7, 5]), staging)
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache, old[[0, 1, 2, 3, 4, 6, 6, 4]])


def test_more_layers_than_one_launch_takes(kernels: Any) -> None:
    caches = [100 * layer + torch.arange(4 * (1 + layer % 3)).view(4, -1) for layer in range(131)]
    before = [cache.clone() for cache in caches]
    kernels.copy_blocks(caches, torch.tensor([[0, 2]]))
    assert all(torch.equal(cache, old[[0, 1, 0, 3]]) for cache, old in zip(caches, before, strict=True))
    staging = torch.zeros(2, sum(cache[0].nbytes for cache in caches), dtype=torch.uint8)
    kernels.gather_blocks(caches, torch.tensor([3, 1]), staging)
    expected = [torch.cat([old[block].view(torch.uint8) for old in before]) for block in (3, 1)]
    assert torch.equal(staging, torch.stack(expected))
    kernels.scatter_blocks(caches, torch.tensor([1, 0]), staging)
    assert all(torch.equal(cache, old[[1, 3, 0, 3]]) for cache, old in zip(caches, before, strict=True))


def test_nothing_to_copy_is_fine(kernels: Any) -> None:
    caches = layers()
    before = [cache.clone() for cache in caches]
    kernels.copy_blocks(caches, torch.zeros(0, 2, dtype=torch.int64))
    kernels.copy_blocks([], torch.zeros(0, 2, dtype=torch.int64))
    assert all(torch.equal(a, b) for a, b in zip(caches, before, strict=True))


def test_block_copies_refuse_what_they_cannot_do() -> None:
    caches = layers()
    size = sum(cache[0].numel() * cache.element_size() for cache in caches)
    with pytest.raises(RuntimeError, match=r"copy_blocks: pairs: .*no source, got block 2 twice"):
        ops.copy_blocks(caches, torch.tensor([[1, 2], [2, 3]]))
    with pytest.raises(RuntimeError, match=r"copy_blocks: pairs: .*distinct.*got block 3 twice"):
        ops.copy_blocks(caches, torch.tensor([[1, 3], [2, 3]]))
    with pytest.raises(RuntimeError, match="copy_blocks: pairs: wanted block ids from 0 to 7, got 8"):
        ops.copy_blocks(caches, torch.tensor([[1, 8]]))
    with pytest.raises(RuntimeError, match=r"copy_blocks: caches: wanted .*num_blocks = 8"):
        ops.copy_blocks([*caches, torch.zeros(7, 4)], torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match="copy_blocks: caches: wanted a contiguous tensor"):
        ops.copy_blocks([torch.zeros(8, 6)[:, ::2]], torch.tensor([[1, 2]]))
    with pytest.raises(RuntimeError, match="gather_blocks: staging: wanted"):
        ops.gather_blocks(caches, torch.tensor([1]), torch.zeros(1, size - 1, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="gather_blocks: ids: wanted block ids from 0 to 7, got -1"):
        ops.gather_blocks(caches, torch.tensor([-1]), torch.zeros(1, size, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="scatter_blocks: ids: wanted distinct"):
        ops.scatter_blocks(caches, torch.tensor([1, 1]), torch.zeros(2, size, dtype=torch.uint8))
