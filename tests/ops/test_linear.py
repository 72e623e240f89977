"""The packed linear layer against float64, and the rule that a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine import ops

DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=ops.isa_levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa("auto")


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(
    m: int, n: int, k: int, dtype: torch.dtype, *, bias: bool = False, out_dtype: torch.dtype | None = None
) -> None:
    x, weight = random(m, k, dtype=dtype), random(n, k, dtype=dtype, seed=1)
    b = random(n, dtype=dtype, seed=2) if bias else None
    got = ops.linear(x, ops.pack_linear(weight), b, n, out_dtype=out_dtype)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert got.shape == (m, n)
    assert got.dtype == (out_dtype or dtype)
    # an accumulator of k products: k roundings of 2^-24 at the size of the running sum
    scale = (x.double().abs() @ weight.double().abs().T) + 1
    bound = scale * 2.0**-24 * (8 + k**0.5)
    if got.dtype == torch.bfloat16:
        bound = bound + exact.abs() * 2.0**-8
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 32, 32), (3, 33, 31), (5, 60, 1000), (7, 1000, 60), (12, 64, 7), (13, 576, 576), (25, 100, 33),
     (64, 96, 1536), (300, 70, 45)],
)  # fmt: skip
def test_against_float64(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    check(m, n, k, dtype)
    check(m, n, k, dtype, bias=True)


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1000, 64), (17, 96, 200)])
def test_float32_out_of_bfloat16(m: int, n: int, k: int) -> None:
    check(m, n, k, torch.bfloat16, bias=True, out_dtype=torch.float32)


def test_bfloat16_output_is_the_float32_output_rounded() -> None:
    x, packed = random(9, 576, dtype=torch.bfloat16), ops.pack_linear(random(100, 576, dtype=torch.bfloat16, seed=1))
    wide = ops.linear(x, packed, None, 100, out_dtype=torch.float32)
    assert torch.equal(ops.linear(x, packed, None, 100), wide.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(100, 61), (96, 64), (1000, 60)])
def test_a_row_does_not_know_its_neighbours(n: int, k: int, dtype: torch.dtype) -> None:
    x, packed = random(600, k, dtype=dtype), ops.pack_linear(random(n, k, dtype=dtype, seed=1))
    bias = random(n, dtype=dtype, seed=2)
    alone = torch.cat([ops.linear(x[i : i + 1], packed, bias, n) for i in range(600)])
    for m in [*range(1, 66), 95, 96, 97, 127, 128, 255, 256, 257, 384, 511, 512, 513, 600]:
        assert torch.equal(ops.linear(x[:m], packed, bias, n), alone[:m]), m
    order = torch.randperm(600, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ops.linear(x[order], packed, bias, n), alone[order])
    assert torch.equal(ops.linear(x[250:263], packed, bias, n), alone[250:263])


def test_every_row_count_at_a_model_shape(level: str) -> None:
    n, k = (576, 1536) if level.startswith(("avx512", "avx2")) else (96, 512)
    x, packed = random(600, k, dtype=torch.bfloat16), ops.pack_linear(random(n, k, dtype=torch.bfloat16, seed=1))
    whole = ops.linear(x, packed, None, n)
    for m in range(1, 600, 1 if level in ("avx512", "avx512_bf16") else 37):
        assert torch.equal(ops.linear(x[600 - m :], packed, None, n), whole[600 - m :]), m


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 16, 200])
def test_thread_count_changes_nothing(m: int, dtype: torch.dtype) -> None:
    x, packed = random(m, 576, dtype=dtype), ops.pack_linear(random(1000, 576, dtype=dtype, seed=1))
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ops.linear(x, packed, None, 1000))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs(dtype: torch.dtype) -> None:
    wide, weight = random(20, 300, dtype=dtype), random(80, 300, dtype=dtype, seed=1)
    x, w = wide[:, 100:161], weight[:, 7:68]
    got = ops.linear(x, ops.pack_linear(w), None, 80)
    assert torch.equal(got, ops.linear(x.contiguous(), ops.pack_linear(w.contiguous()), None, 80))
    packed = ops.pack_linear(w)
    every_third = ops.linear(wide[::3, :61], packed, None, 80)
    assert torch.equal(every_third[2], ops.linear(wide[6:7, :61], packed, None, 80)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_row_stays_alone(dtype: torch.dtype) -> None:
    x, packed = random(30, 100, dtype=dtype), ops.pack_linear(random(64, 100, dtype=dtype, seed=1))
    clean = ops.linear(x, packed, None, 64)
    x[11] = torch.nan
    x[12, 3] = torch.inf
    got = ops.linear(x, packed, None, 64)
    rest = [i for i in range(30) if i not in (11, 12)]
    assert torch.equal(got[rest], clean[rest])
    assert got[11].isnan().all()
    assert not got[12].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_the_gate_is_what_two_operations_give(kind: ops.ActivationKind, bias: bool, dtype: torch.dtype) -> None:
    for m, width, k in [(1, 1, 9), (5, 16, 64), (13, 100, 200), (30, 333, 61)]:
        x, weight = random(m, k, dtype=dtype), random(2 * width, k, dtype=dtype, seed=1)
        b = random(2 * width, dtype=dtype, seed=2) if bias else None
        both = ops.linear(x, ops.pack_linear(weight), b, 2 * width)
        apart = ops.activation(both[:, :width].contiguous(), kind) * both[:, width:]
        got = ops.linear(x, ops.pack_linear(weight, gated=True), b, width, activation=kind)
        assert torch.equal(got, apart), (m, width, k)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_residual_is_what_two_operations_give(dtype: torch.dtype) -> None:
    for m, n, k in [(1, 1, 9), (5, 32, 64), (13, 100, 200), (30, 333, 61)]:
        x, packed = random(m, k, dtype=dtype), ops.pack_linear(random(n, k, dtype=dtype, seed=1))
        bias, residual = random(n, dtype=dtype, seed=2), random(m, n, dtype=dtype, seed=3) * 30
        got = ops.linear(x, packed, bias, n, residual=residual)
        assert torch.equal(got, residual + ops.linear(x, packed, bias, n)), (m, n, k)


def test_weights_come_and_go_in_any_order() -> None:
    """Packed weights share chunks of memory; the middle one of each kind is larger than a chunk."""
    sizes = [(64, 40), (3000, 576), (16000, 1100), (5000, 1000)] * 3
    weights = [random(n, k, dtype=torch.bfloat16, seed=i) for i, (n, k) in enumerate(sizes)]
    packed = {i: ops.pack_linear(w) for i, w in enumerate(weights)}
    first = {i: p.clone() for i, p in packed.items()}
    for gone in [3, 0, 7, 2, 1, 11, 5]:
        del packed[gone]
        again = ops.pack_linear(weights[gone])
        assert torch.equal(again, first[gone])
        assert all(torch.equal(p, first[i]) for i, p in packed.items())
        assert again.data_ptr() % 64 == 0


def test_no_rows() -> None:
    packed = ops.pack_linear(random(10, 8, dtype=torch.float32))
    assert ops.linear(torch.empty(0, 8), packed, None, 10).shape == (0, 10)


X, PACKED = torch.zeros(2, 40), ops.pack_linear(torch.zeros(50, 40))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear(X[0], PACKED, None, 50), r"linear: x: wanted \[rows, in_features\]"),
        (lambda: ops.linear(X[:, :39], PACKED, None, 50), "linear: packed: wanted"),
        (lambda: ops.linear(X, PACKED, None, 65), "linear: packed: wanted"),
        (lambda: ops.linear(X, PACKED, None, 0), "linear: out_features: wanted at least 1"),
        (lambda: ops.linear(X.bfloat16(), PACKED, None, 50), "linear: packed: wanted bfloat16, got float32"),
        (lambda: ops.linear(X.double(), PACKED, None, 50), "linear: x: wanted float32 or bfloat16, got float64"),
        (lambda: ops.linear(X.T.contiguous().T, PACKED, None, 50), "linear: x: wanted elements of the last dimension"),
        (lambda: ops.linear(X, PACKED, torch.zeros(49), 50), r"linear: bias: wanted \[out_features\] = \[50\]"),
        (lambda: ops.linear(X, PACKED, None, 50, out_dtype=torch.bfloat16), "linear: out_dtype: wanted"),
        (lambda: ops.linear(X, PACKED, None, 50, activation="relu"), "linear: packed: wanted"),
        (lambda: ops.linear(X, PACKED, None, 25, activation="relu"), "linear: activation: wanted silu, gelu or"),
        (lambda: ops.linear(X, PACKED, torch.zeros(25), 25, activation="silu"), r"linear: bias: wanted \[2 \* out_"),
        (lambda: ops.linear(X, PACKED, None, 25, activation="silu", residual=X), "linear: residual: wanted none"),
        (lambda: ops.linear(X, PACKED, None, 50, residual=X), r"linear: residual: wanted \[rows, out_features\]"),
        (lambda: ops.linear(X, PACKED, None, 50, residual=torch.zeros(2, 50).bfloat16()), "linear: residual: wanted"),
        (lambda: ops.pack_linear(torch.zeros(3, 4), gated=True), "pack_linear: weight: wanted an even number of rows"),
        (lambda: ops.pack_linear(torch.zeros(3)), "pack_linear: weight: wanted"),
        (lambda: ops.pack_linear(torch.zeros(0, 3)), "pack_linear: weight: wanted at least one row"),
        (lambda: ops.pack_linear(torch.zeros(3, 3, dtype=torch.int32)), "pack_linear: weight: wanted float32 or"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()
