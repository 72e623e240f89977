"""rotary, qk_norm and rope_and_cache of csrc/cuda, and caches of fp8: against torch in the model's own roundings."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from engine.ops import NormVariant
from tests.ops.kernels import LaunchedOps
from tests.ops.paged import Shape, empty_caches
from tests.ops.test_norm import VARIANTS, close

EPS = 1e-5


@dataclass
class Heads:
    """Rows of a fused projection, as a model hands them over: strided queries, keys and values of 21 tokens."""

    dtype: torch.dtype
    dim: int = 64
    rotary_dim: int = 64
    value_dim: int = 64
    num_query: int = 6
    num_kv: int = 2
    tokens: int = 21

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.dim)
        widths = [self.num_query * self.dim, self.num_kv * self.dim, self.num_kv * self.value_dim, 8]
        self.fused = torch.randn(self.tokens, sum(widths), generator=generator).to(self.dtype)
        angle = torch.rand(40, self.rotary_dim // 2, generator=generator) * 6
        self.cos = torch.cat([angle.cos()] * 2, 1).to(self.dtype)
        self.sin = torch.cat([-angle.sin(), angle.sin()], 1).to(self.dtype)
        self.positions = torch.randint(0, 40, (self.tokens,), generator=generator)
        self.weights = tuple((torch.rand(self.dim, generator=generator) + 0.5).to(self.dtype) for _ in range(2))

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin

    def parts(self, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as views of a fused tensor."""
        query, key, value, _ = fused.split(
            [self.num_query * self.dim, self.num_kv * self.dim, self.num_kv * self.value_dim, 8], dim=1
        )
        heads = [
            x.unflatten(1, (-1, width)) for x, width in ((query, self.dim), (key, self.dim), (value, self.value_dim))
        ]
        return heads[0], heads[1], heads[2]

    def rotated(self, x: Tensor) -> Tensor:
        """As transformers does it in x's dtype, one rounding per product and sum."""
        cos, sin = self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)
        turned, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        half = self.rotary_dim // 2
        swapped = torch.cat([turned[..., half:], turned[..., :half]], -1)
        return torch.cat([turned * cos + swapped * sin, rest], -1)

    def normed(self, x: Tensor, weight: Tensor, variant: NormVariant) -> Tensor:
        scaled = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
        if variant == "llama":
            return weight * scaled.to(x.dtype)
        return (scaled * (weight.double() + (variant == "gemma"))).to(x.dtype)


WIDTHS = [(64, 64), (128, 128), (256, 256), (80, 80), (96, 24), (128, 0), (512, 512), (6, 6), (20, 10)]


@pytest.mark.parametrize(("dim", "rotary_dim"), WIDTHS)
def test_rotary(launched: LaunchedOps, dtype: torch.dtype, dim: int, rotary_dim: int) -> None:
    heads = Heads(dtype, dim=dim, rotary_dim=rotary_dim)
    query, key, value = heads.parts(heads.fused.clone())
    want = [heads.rotated(query), heads.rotated(key), value.clone()]
    launched.rotary(query, key, *heads.tables, heads.positions)
    assert all(torch.equal(got, expected) for got, expected in zip((query, key, value), want, strict=True))


def test_rotary_of_contiguous_heads_at_odd_places(launched: LaunchedOps, dtype: torch.dtype) -> None:
    heads = Heads(dtype)
    query, key, _ = heads.parts(heads.fused)
    shifted = torch.zeros(heads.tokens, 8 * 64 + 1, dtype=dtype)[:, 1:]  # no pair of elements is aligned
    shifted[:, : 6 * 64], shifted[:, 6 * 64 :] = query.flatten(1), key.flatten(1)
    odd_query, odd_key = (x.unflatten(1, (-1, 64)) for x in shifted.split([6 * 64, 2 * 64], 1))
    launched.rotary(odd_query, odd_key, *heads.tables, heads.positions)
    assert torch.equal(odd_query, heads.rotated(query))
    assert torch.equal(odd_key, heads.rotated(key))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("dim", "rotary_dim"), [(64, 64), (256, 256), (96, 24), (20, 20)])
def test_qk_norm(launched: LaunchedOps, dtype: torch.dtype, dim: int, rotary_dim: int, variant: NormVariant) -> None:
    heads = Heads(dtype, dim=dim, rotary_dim=rotary_dim)
    query, key, value = heads.parts(heads.fused.clone())
    want = [heads.normed(x, w, variant) for x, w in zip((query, key), heads.weights, strict=True)]
    untouched = value.clone()
    launched.qk_norm(query, key, heads.weights, EPS, variant, None, heads.positions)
    for got, expected in zip((query, key), want, strict=True):
        close(got, expected, 2)
    assert torch.equal(value, untouched)
    normed = [query.clone(), key.clone()]
    query[:], key[:], _ = heads.parts(heads.fused)
    launched.qk_norm(query, key, heads.weights, EPS, variant, heads.tables, heads.positions)
    if rotary_dim == dim:  # how a head is dealt out to lanes, and so the order of the sum, depends on rotary_dim
        assert torch.equal(query, heads.rotated(normed[0]))
        assert torch.equal(key, heads.rotated(normed[1]))
    else:
        close(query[..., rotary_dim:], want[0][..., rotary_dim:], 2)


@pytest.mark.parametrize("normed", [False, True], ids=["rope", "norm-and-rope"])
@pytest.mark.parametrize(("dim", "value_dim", "block_size"), [(64, 64, 16), (128, 128, 32), (80, 24, 16), (20, 6, 16)])
def test_rope_and_cache_is_its_parts(
    launched: LaunchedOps, dtype: torch.dtype, dim: int, value_dim: int, block_size: int, normed: bool
) -> None:
    heads = Heads(dtype, dim=dim, rotary_dim=dim, value_dim=value_dim)
    shape = Shape(kv_heads=2, key_dim=dim, value_dim=value_dim, block_size=block_size)
    slots = torch.randperm(4 * block_size, generator=torch.Generator().manual_seed(4))[: heads.tokens]
    slots[[3, 20]] = -1
    query, key, value = heads.parts(heads.fused.clone())
    if normed:
        launched.qk_norm(query, key, heads.weights, EPS, "gemma", heads.tables, heads.positions)
    else:
        launched.rotary(query, key, *heads.tables, heads.positions)
    want = empty_caches(4, shape, dtype)
    launched.reshape_and_cache(key, value, *want, slots)
    got = empty_caches(4, shape, dtype)
    fused = heads.fused.clone()
    launched.rope_and_cache(
        *heads.parts(fused), *got, slots, heads.positions, heads.tables,
        weights=heads.weights if normed else None, eps=EPS, variant="gemma",
    )  # fmt: skip
    assert all(torch.equal(a, b) for a, b in zip(heads.parts(fused), (query, key, value), strict=True))
    for cache, expected in zip(got, want, strict=True):
        assert torch.equal(cache.isnan(), expected.isnan())
        assert torch.equal(cache.nan_to_num(), expected.nan_to_num())
    assert int((~got[0].isnan()).sum()) == (heads.tokens - 2) * 2 * dim


@pytest.mark.parametrize(("dim", "value_dim"), [(64, 64), (80, 22)])
def test_fp8_caches(launched: LaunchedOps, dtype: torch.dtype, dim: int, value_dim: int) -> None:
    heads = Heads(dtype, dim=dim, rotary_dim=dim, value_dim=value_dim)
    heads.fused[5] *= 5000  # saturates
    scales = torch.tensor([0.25]), torch.tensor([3.0])
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(4))[: heads.tokens]
    shape = Shape(kv_heads=2, key_dim=dim, value_dim=value_dim)
    fused = heads.fused.clone()
    query, key, value = heads.parts(fused)
    places = slots // 16, slice(None), slots % 16
    for rope in (False, True):
        caches = empty_caches(3, shape, torch.float8_e4m3fn)
        if rope:
            launched.rope_and_cache(
                query, key, value, *caches, slots, heads.positions, heads.tables, scales=scales
            )  # changes key, which is then what the cache holds
        else:
            launched.reshape_and_cache(key, value, *caches, slots, *scales)
        for cache, rows, scale in zip(caches, (key, value), scales, strict=True):
            want = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
            assert torch.equal(cache[places].float(), want.float())
            assert int(cache.float().isnan().sum()) == cache.numel() - rows.numel()


def test_without_scales_fp8_is_as_it_is(launched: LaunchedOps) -> None:
    rows = torch.randn(16, 1, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    caches = empty_caches(1, Shape(kv_heads=1), torch.float8_e4m3fn)
    launched.reshape_and_cache(rows, rows, *caches, torch.arange(16))
    for cache in caches:
        assert torch.equal(cache[0, 0].float(), rows[:, 0].to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("change", [{"dim": 63}, {"dim": 514}, {"rotary_dim": 66}])
def test_widths_that_cannot_be_are_refused(launched: LaunchedOps, change: dict[str, int]) -> None:
    dim, rotary_dim = change.get("dim", 64), change.get("rotary_dim", 64)
    rows = torch.zeros(2, 1, dim)
    table = torch.zeros(4, rotary_dim)
    with pytest.raises(RuntimeError, match="rotary: error 1"):
        launched.rotary(rows, rows.clone(), table, table, torch.zeros(2, dtype=torch.int64))
