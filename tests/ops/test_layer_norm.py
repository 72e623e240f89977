"""The layer norm and float32 rows with bfloat16 weights, both the CPU's alone: against torch, and by rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops import NormVariant

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=ops.isa_levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa("auto")


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return ops.rms_norm(x, weight, EPS, "layer")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 15, 60, 64, 127, 576, 1000, 2048])
def test_against_torch(dim: int, dtype: torch.dtype) -> None:
    x, weight = drawn(9, dim, dtype=dtype) * 3 + 1, drawn(2, dim, dtype=dtype, seed=1)
    exact = torch.nn.functional.layer_norm(x.double(), (dim,), weight[0].double(), weight[1].double(), EPS)
    got = norm(x, weight)
    assert got.dtype == dtype
    step = 2.0**-7 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.double(), exact, rtol=step, atol=3e-6)
    assert (got == exact.to(dtype)).float().mean() > (0.99 if dtype == torch.bfloat16 else 0.2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_after_adding(dtype: torch.dtype) -> None:
    x, residual, weight = (drawn(*s, dtype=dtype, seed=i) for i, s in enumerate([(7, 60), (7, 60), (2, 60)]))
    total = x + residual
    got = ops.fused_add_rms_norm(x, residual, weight, EPS, "layer")
    assert torch.equal(residual, total)
    assert torch.equal(got, norm(total, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [60, 1000])
def test_a_row_does_not_know_its_neighbours(dim: int, dtype: torch.dtype) -> None:
    x, weight = drawn(300, dim, dtype=dtype), drawn(2, dim, dtype=dtype, seed=1)
    alone = torch.cat([norm(x[i : i + 1], weight) for i in range(300)])
    assert torch.equal(norm(x, weight), alone)


def test_a_weight_without_a_bias_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"rms_norm: weight: wanted \[2, dim\] = \[2, 40\]"):
        norm(torch.zeros(3, 40), torch.zeros(40))


@pytest.mark.parametrize("variant", get_args(NormVariant))
@pytest.mark.parametrize("dim", [60, 576])
def test_float32_rows_are_rounded_once(dim: int, variant: NormVariant) -> None:
    """As the same rows with the same weight in float32, but for llama's rounding in between."""
    x = drawn(9, dim, dtype=torch.float32)
    weight = drawn(*((2, dim) if variant == "layer" else (dim,)), dtype=torch.bfloat16, seed=1)
    got = ops.rms_norm(x, weight, EPS, variant)
    exact = ops.rms_norm(x, weight.float(), EPS, variant)
    assert got.dtype == torch.bfloat16
    if variant == "llama":
        torch.testing.assert_close(got.float(), exact, rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(got, exact.bfloat16())
    residual, added = drawn(9, dim, dtype=torch.float32, seed=3), drawn(9, dim, dtype=torch.float32, seed=4)
    total = residual + added
    assert torch.equal(
        ops.fused_add_rms_norm(added, residual, weight, EPS, variant), ops.rms_norm(total, weight, EPS, variant)
    )
    assert torch.equal(residual, total)
