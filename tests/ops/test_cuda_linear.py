"""linear of csrc/cuda: against float64, its epilogues against separate ops; no row sees its neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.ops import ActivationKind
from tests.ops.kernels import KINDS, LaunchedOps
from tests.ops.test_norm import STEPS, random

ROWS = [1, 2, 17, 64, 130]  # each tile, whole and ragged


def padded(*shape: int, dtype: torch.dtype, seed: int = 0, by: int = 8) -> Tensor:
    """Random rows inside wider ones, with NaN between them, before the first and behind the last."""
    rows, columns = shape
    whole = torch.full((rows + 2, columns + by), torch.nan, dtype=dtype)
    inside = whole[1:-1, :columns]
    inside.copy_(random(rows, columns, dtype=dtype, seed=seed))
    return inside


def close(got: Tensor, x: Tensor, weight: Tensor, extra: Tensor | float = 0.0) -> None:
    """Against float64, within float32 sums of so many products and a rounding to got's type."""
    exact = x.double() @ weight.double().T
    exact = exact + (extra.double() if isinstance(extra, Tensor) else extra)
    bound = x.double().abs() @ weight.double().abs().T * 2.0**-20 + exact.abs() * STEPS[got.dtype] + 1e-6
    assert bool(((got.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("out_features", "in_features"), [(72, 640), (200, 264), (11, 60), (1, 1), (129, 1003)])
def test_against_float64(
    launched: LaunchedOps, dtype: torch.dtype, rows: int, out_features: int, in_features: int
) -> None:
    x = padded(rows, in_features, dtype=dtype)
    weight = padded(out_features, in_features, dtype=dtype, seed=1)
    bias = random(out_features, dtype=torch.float32, seed=2)
    close(launched.linear(x, weight), x, weight)
    close(launched.linear(x, weight, bias, out_dtype=torch.float32), x, weight, bias)
    close(launched.linear(x, weight, bias.to(dtype), out_dtype=torch.float32), x, weight, bias.to(dtype))


@pytest.mark.parametrize("by", [1, 7], ids=["rows-anywhere", "rows-in-odd-places"])
def test_rows_that_no_16_bytes_begin_at(launched: LaunchedOps, dtype: torch.dtype, by: int) -> None:
    """Read element by element, for the same bits."""
    x, weight = random(17, 128, dtype=dtype), random(40, 128, dtype=dtype, seed=1)
    odd_x, odd_weight = padded(17, 128, dtype=dtype, by=by), padded(40, 128, dtype=dtype, seed=1, by=by)
    assert torch.equal(odd_x, x)
    want = launched.linear(x, weight, out_dtype=torch.float32)
    assert torch.equal(launched.linear(odd_x, weight, out_dtype=torch.float32), want)
    assert torch.equal(launched.linear(x, odd_weight, out_dtype=torch.float32), want)


@pytest.mark.parametrize(("out_features", "in_features"), [(72, 1000), (128, 256), (24, 60)])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_row_does_not_know_its_neighbours(
    launched: LaunchedOps, dtype: torch.dtype, out_features: int, in_features: int, gated: bool
) -> None:
    """In every tile, with splits folded by a second kernel and in one block, the same bits."""
    x = random(130, in_features, dtype=dtype)
    weight = random(out_features * (2 if gated else 1), in_features, dtype=dtype, seed=1)
    activation: ActivationKind | None = "silu" if gated else None
    want = launched.linear(x, weight, out_dtype=torch.float32, activation=activation)
    for rows in ROWS:
        for workspace in (None, 0):
            got = launched.linear(
                x[:rows], weight, out_dtype=torch.float32, activation=activation, workspace_bytes=workspace
            )
            assert torch.equal(got, want[:rows])
    last = launched.linear(x[129:], weight, out_dtype=torch.float32, activation=activation)
    assert torch.equal(last, want[129:])


def test_workspace_is_for_the_splits(launched: LaunchedOps) -> None:
    def number(*sizes: int) -> int:
        return launched.launchers.number("linear_workspace", *sizes)

    assert number(17, 72, 1000) == 3 * 17 * 72 * 4
    assert number(1, 4096, 4096) == 8 * 4096 * 4
    assert number(1, 72, 511) == 0  # one split
    assert number(1, 128256, 4096) == 0  # enough rows of the weight for every multiprocessor
    assert number(8192, 4096, 4096) == 0  # enough tiles
    assert number(0, 72, 1000) == 0


@pytest.mark.parametrize("rows", [3, 130])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["same", "f32"])
@pytest.mark.parametrize("out_features", [40, 33])
def test_residual_is_a_second_operation(
    launched: LaunchedOps, dtype: torch.dtype, rows: int, out_features: int, out_dtype: torch.dtype | None
) -> None:
    x, weight = random(rows, 576, dtype=dtype), random(out_features, 576, dtype=dtype, seed=1)
    bias = random(out_features, dtype=dtype, seed=2)
    residual = random(rows, out_features, dtype=out_dtype or dtype, seed=3)
    product = launched.linear(x, weight, bias, out_dtype=out_dtype)
    got = launched.linear(x, weight, bias, out_dtype=out_dtype, residual=residual)
    assert torch.equal(got, residual + product)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "out_features"), [(3, 40), (33, 100), (130, 33)])
def test_gate_is_a_second_operation(
    launched: LaunchedOps, dtype: torch.dtype, rows: int, out_features: int, kind: ActivationKind
) -> None:
    x, weight = random(rows, 520, dtype=dtype), random(2 * out_features, 520, dtype=dtype, seed=1) / 8
    bias = random(2 * out_features, dtype=torch.float32, seed=2)
    for out_dtype in (None, torch.float32):
        product = launched.linear(x, weight, bias, out_dtype=out_dtype)
        got = launched.linear(x, weight, bias, out_dtype=out_dtype, activation=kind)
        want = {"silu": launched.silu_and_mul, "gelu": launched.gelu_and_mul, "gelu_tanh": launched.gelu_tanh_and_mul}
        assert torch.equal(got, want[kind](product))


def test_float32_has_the_bits_of_the_cpu(launched: LaunchedOps) -> None:
    """One order for both: from the first element of K to the last."""
    x, weight = padded(33, 403, dtype=torch.float32), random(2 * 70, 403, dtype=torch.float32, seed=1)
    bias = random(2 * 70, dtype=torch.float32, seed=2)
    plain, gated = ops.pack_linear(weight), ops.pack_linear(weight, gated=True)
    assert torch.equal(launched.linear(x, weight, bias), ops.linear(x, plain, bias, 140))
    got = launched.linear(x, weight, bias, activation="silu")
    torch.testing.assert_close(got, ops.linear(x, gated, bias, 70, activation="silu"), rtol=1e-6, atol=1e-6)


def test_what_is_not_finite_stays_in_its_row(launched: LaunchedOps, dtype: torch.dtype) -> None:
    x, weight = random(20, 256, dtype=dtype), random(40, 256, dtype=dtype, seed=1)
    x[3, 5], x[17, 255] = torch.nan, torch.inf
    out = launched.linear(x, weight)
    spoiled = ~out.isfinite().all(1)
    assert spoiled.nonzero().flatten().tolist() == [3, 17]


def test_no_rows(launched: LaunchedOps, dtype: torch.dtype) -> None:
    assert launched.linear(torch.zeros(0, 16, dtype=dtype), torch.zeros(8, 16, dtype=dtype)).shape == (0, 8)


def test_what_cannot_be_is_refused(launched: LaunchedOps) -> None:
    x, weight = torch.zeros(2, 16).half(), torch.zeros(8, 16).half()
    for refused in (
        lambda: launched.linear(x, weight, torch.zeros(8).bfloat16()),
        lambda: launched.linear(x, weight, activation="silu", residual=torch.zeros(2, 4).half()),
        lambda: launched.linear(x[:, :0], weight[:, :0]),
    ):
        with pytest.raises(RuntimeError, match="linear: error 1"):
            refused()
