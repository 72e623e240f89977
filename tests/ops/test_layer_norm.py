"""The layer norm and float32 rows with 16-bit weights: against torch, and by rows."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops import NormVariant

EPS = 1e-5
STEPS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # between neighbours


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dim", [1, 15, 60, 64, 127, 576, 1000, 2048])
def test_against_torch(kernels: Any, dim: int, dtype: torch.dtype) -> None:
    x, weight = drawn(9, dim, dtype=dtype) * 3 + 1, drawn(2, dim, dtype=dtype, seed=1)
    exact = torch.nn.functional.layer_norm(x.double(), (dim,), weight[0].double(), weight[1].double(), EPS)
    got = kernels.rms_norm(x, weight, EPS, "layer")
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), exact, rtol=STEPS[dtype], atol=3e-6)
    assert (got == exact.to(dtype)).float().mean() > (0.2 if dtype == torch.float32 else 0.99)


def test_after_adding(kernels: Any, dtype: torch.dtype) -> None:
    x, residual, weight = (drawn(*s, dtype=dtype, seed=i) for i, s in enumerate([(7, 60), (7, 60), (2, 60)]))
    total = x + residual
    got = kernels.fused_add_rms_norm(x, residual, weight, EPS, "layer")
    assert torch.equal(residual, total)
    assert torch.equal(got, kernels.rms_norm(total, weight, EPS, "layer"))


@pytest.mark.parametrize("dim", [60, 1000])
def test_a_row_does_not_know_its_neighbours(kernels: Any, dim: int, dtype: torch.dtype) -> None:
    x, weight = drawn(300, dim, dtype=dtype), drawn(2, dim, dtype=dtype, seed=1)
    alone = torch.cat([kernels.rms_norm(x[i : i + 1], weight, EPS, "layer") for i in range(300)])
    assert torch.equal(kernels.rms_norm(x, weight, EPS, "layer"), alone)


def test_a_weight_without_a_bias_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"rms_norm: weight: wanted \[2, dim\] = \[2, 40\]"):
        ops.rms_norm(torch.zeros(3, 40), torch.zeros(40), EPS, "layer")


@pytest.mark.parametrize("variant", get_args(NormVariant))
@pytest.mark.parametrize("dim", [60, 576])
def test_float32_rows_are_rounded_once(kernels: Any, dim: int, variant: NormVariant) -> None:
    """As the same rows with the same weight in float32, but for llama's rounding in between."""
    x = drawn(9, dim, dtype=torch.float32)
    shape = (2, dim) if variant == "layer" else (dim,)
    for dtype in (torch.bfloat16,) if kernels is ops else (torch.bfloat16, torch.float16):
        weight = drawn(*shape, dtype=dtype, seed=1)
        got = kernels.rms_norm(x, weight, EPS, variant)
        exact = kernels.rms_norm(x, weight.float(), EPS, variant)
        assert got.dtype == dtype
        if variant == "llama":
            torch.testing.assert_close(got.float(), exact, rtol=2.0**-7, atol=0)
        else:
            assert torch.equal(got, exact.to(dtype))
        residual, added = drawn(9, dim, dtype=torch.float32, seed=3), drawn(9, dim, dtype=torch.float32, seed=4)
        total = residual + added
        after = kernels.fused_add_rms_norm(added, residual, weight, EPS, variant)
        assert torch.equal(after, kernels.rms_norm(total, weight, EPS, variant))
        assert torch.equal(residual, total)


def test_float32_rows_inside_a_wider_tensor(kernels: Any) -> None:
    fused, weight = drawn(11, 5 * 64, dtype=torch.float32), drawn(2, 64, dtype=torch.bfloat16, seed=1)
    for heads in (fused.view(11, 5, 64)[:, 1:4], fused[:, 64:128], fused[:, 3:67]):
        got = kernels.rms_norm(heads, weight, EPS, "layer")
        assert torch.equal(got, kernels.rms_norm(heads.contiguous(), weight, EPS, "layer"))
