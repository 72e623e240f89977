"""Activations against float64, deep into their tails, and the rule that a value's place does not matter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops import ActivationKind

KINDS = get_args(ActivationKind)


def gated(kernels: Any, kind: str) -> Callable[[Tensor], Tensor]:
    function: Callable[[Tensor], Tensor] = getattr(kernels, f"{kind}_and_mul")
    return function


def exact(x: Tensor, kind: str) -> Tensor:
    """In float64, written so that negative tails do not cancel."""
    x = x.double()
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "gelu":
        return 0.5 * x * torch.special.erfc(-x / 2**0.5)
    return x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_accurate(kernels: Any, kind: ActivationKind) -> None:
    x = torch.linspace(-9, 30, 200_001)
    got, want = kernels.activation(x, kind).double(), exact(x, kind)
    error = (got - want).abs() / want.abs().clamp(min=1e-30)
    # rounding the argument of the exponential costs |argument| * 2^-24, most of all where gelu's tail is steep; CUDA's
    # erfcf may be off by four units in the last place, its expf by two
    assert error[x.abs() < 3].max() < (1.5e-6 if getattr(kernels, "device", "cpu") == "cuda" else 1e-6)
    assert error.max() < 2e-5
    assert (got - want).abs().max() < 4e-6  # half a unit in the last place at 30 is 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_float32_rounded(kernels: Any, kind: ActivationKind) -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16)
    x = x[x.isfinite()]
    got = kernels.activation(x, kind)
    assert torch.equal(got, kernels.activation(x.float(), kind).bfloat16())
    assert got.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_extremes(kernels: Any, kind: ActivationKind) -> None:
    x = torch.tensor([0.0, -0.0, 100.0, 3e38, torch.inf, torch.nan, -100.0, -3e38])
    got = kernels.activation(x, kind)
    assert torch.equal(got[:5], torch.tensor([0.0, -0.0, 100.0, 3e38, torch.inf]))
    assert got[5].isnan()
    assert (got[6:].abs() < 1e-36).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 60, 500, 1536])
def test_gated(kernels: Any, width: int, kind: ActivationKind, dtype: torch.dtype) -> None:
    x = torch.randn(5, 2 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    got = gated(kernels, kind)(x)
    assert got.shape == (5, width)
    assert torch.equal(got, kernels.activation(x[:, :width].contiguous(), kind) * x[:, width:])


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_does_not_know_its_place(kernels: Any, kind: ActivationKind, dtype: torch.dtype) -> None:
    x = torch.randn(40_003, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = kernels.activation(x, kind)
    for start, end in [(1, 40_003), (7, 31), (0, 1), (39_990, 40_003), (3, 1003)]:
        assert torch.equal(kernels.activation(x[start:end], kind), whole[start:end])
    for width in (1, 13, 1000):
        rows = x[: 2 * width * 20].view(20, 2 * width)
        alone = torch.cat([gated(kernels, kind)(rows[i : i + 1]) for i in range(20)])
        assert torch.equal(gated(kernels, kind)(rows), alone)


def test_empty(kernels: Any) -> None:
    assert kernels.activation(torch.empty(0, 4), "silu").shape == (0, 4)
    assert kernels.silu_and_mul(torch.empty(0, 4)).shape == (0, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.activation(torch.zeros(4), "relu"), "activation: kind: wanted silu, gelu or gelu_tanh, got relu"),
        (lambda: ops.activation(torch.zeros(4, 4).T, "silu"), "activation: x: wanted a contiguous tensor"),
        (lambda: ops.activation(torch.zeros(4).double(), "silu"), "activation: x: wanted float32 or bfloat16"),
        (lambda: ops.silu_and_mul(torch.zeros(4, 3)), "gated_activation: x: wanted an even last dimension"),
        (lambda: ops.silu_and_mul(torch.zeros(4, 0)), "gated_activation: x: wanted an even last dimension"),
        (lambda: ops.silu_and_mul(torch.zeros(())), "gated_activation: x: wanted an even last dimension"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
