"""RMS norms against torch in the model families' own order of rounding, and their independence of other rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops import NormVariant

VARIANTS = tuple(v for v in get_args(NormVariant) if v != "layer")  # that one: test_layer_norm.py
EPS = 1e-5
STEPS = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # between neighbours


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def reference(x: Tensor, weight: Tensor, variant: str) -> Tensor:
    scaled = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS)
    if variant == "llama":
        return weight * scaled.to(x.dtype)
    factor = weight.double() + 1 if variant == "gemma" else weight.double()
    return (scaled * factor).to(x.dtype)


def close(got: Tensor, want: Tensor, roundings: int = 1) -> None:
    """16-bit types may land on a neighbour where float32 and float64 straddle a boundary, once per rounding."""
    assert got.dtype == want.dtype
    step = STEPS[got.dtype] * roundings
    torch.testing.assert_close(got.double(), want.double(), rtol=step, atol=1e-9)
    if got.dtype != torch.float32:
        assert (got == want).float().mean() > 0.99


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [1, 15, 60, 64, 127, 576, 1000, 2048])
def test_against_torch(kernels: Any, dim: int, variant: NormVariant, dtype: torch.dtype) -> None:
    x, weight = random(9, dim, dtype=dtype) * 3, random(dim, dtype=dtype, seed=1)
    close(kernels.rms_norm(x, weight, EPS, variant), reference(x, weight, variant), 2 if variant == "llama" else 1)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dim", [60, 576])
def test_fused_add(kernels: Any, dim: int, variant: NormVariant, dtype: torch.dtype) -> None:
    x, residual = random(7, dim, dtype=dtype), random(7, dim, dtype=dtype, seed=2)
    weight = random(dim, dtype=dtype, seed=1)
    total = x + residual
    got = kernels.fused_add_rms_norm(x, residual, weight, EPS, variant)
    assert torch.equal(residual, total)
    assert torch.equal(got, kernels.rms_norm(total, weight, EPS, variant))


def test_heads_inside_a_fused_projection(kernels: Any, dtype: torch.dtype) -> None:
    fused, weight = random(11, 5 * 64, dtype=dtype), random(64, dtype=dtype, seed=1)
    heads = fused.view(11, 5, 64)[:, 1:4]
    assert torch.equal(
        kernels.rms_norm(heads, weight, EPS, "llama"), kernels.rms_norm(heads.contiguous(), weight, EPS, "llama")
    )
    columns = fused[:, 64:128]
    assert torch.equal(
        kernels.rms_norm(columns, weight, EPS, "f32"), kernels.rms_norm(columns.contiguous(), weight, EPS, "f32")
    )


@pytest.mark.parametrize("dim", [60, 1000])
def test_a_row_does_not_know_its_neighbours(kernels: Any, dim: int, dtype: torch.dtype) -> None:
    x, weight = random(300, dim, dtype=dtype), random(dim, dtype=dtype, seed=1)
    whole = kernels.rms_norm(x, weight, EPS, "llama")
    alone = torch.cat([kernels.rms_norm(x[i : i + 1], weight, EPS, "llama") for i in range(300)])
    assert torch.equal(whole, alone)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(kernels.rms_norm(x, weight, EPS, "llama"), whole)
    finally:
        torch.set_num_threads(threads)


def test_zeros_and_large_values(kernels: Any, dtype: torch.dtype) -> None:
    x = torch.zeros(2, 576, dtype=dtype)
    x[1] = 1e15 if dtype != torch.float16 else 3e4
    got = kernels.rms_norm(x, torch.ones(576, dtype=dtype), 1e-6, "f32")
    assert torch.equal(got[0], x[0])
    torch.testing.assert_close(got[1], torch.ones(576, dtype=dtype), rtol=1e-2, atol=0)


def test_no_rows(kernels: Any) -> None:
    assert kernels.rms_norm(torch.empty(0, 8), torch.ones(8), EPS, "f32").shape == (0, 8)


X, W = torch.zeros(2, 3, 40), torch.zeros(40)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.rms_norm(X, W[:39], EPS, "f32"), r"rms_norm: weight: wanted \[dim\] = \[40\]"),
        (lambda: ops.rms_norm(X, W.half(), EPS, "f32"), "rms_norm: weight: wanted float32, got float16"),
        (lambda: ops.rms_norm(X.bfloat16(), W, EPS, "f32"), "rms_norm: weight: wanted bfloat16, got float32"),
        (lambda: ops.rms_norm(X.half(), W.half(), EPS, "f32"), "rms_norm: x: wanted float32 or bfloat16, got float16"),
        (lambda: ops.rms_norm(X.transpose(1, 2), W[:3], EPS, "f32"), "rms_norm: x: wanted elements of the last"),
        (lambda: ops.rms_norm(torch.zeros(()), W, EPS, "f32"), "rms_norm: x: wanted at least one dimension"),
        (lambda: ops.rms_norm(torch.zeros(2, 0), W[:0], EPS, "f32"), "rms_norm: x: wanted a last dimension"),
        (lambda: ops.rms_norm(X, W, float("nan"), "f32"), "rms_norm: eps: wanted"),
        (lambda: ops.rms_norm(X, W, EPS, "t5"), "rms_norm: variant: wanted llama, gemma, f32 or layer, got t5"),
        (lambda: ops.fused_add_rms_norm(X, X[:1].clone(), W, EPS, "f32"), "fused_add_rms_norm: residual: wanted the"),
        (
            lambda: ops.fused_add_rms_norm(X, X.bfloat16(), W, EPS, "f32"),
            "fused_add_rms_norm: residual: wanted float32",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
