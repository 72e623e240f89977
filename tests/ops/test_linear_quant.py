"""The quantised linear layer against its definition, and the rule that a row's bits depend on that row alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engine import ops
from engine.models.quantised import QuantisedWeight

DTYPES = [torch.float32, torch.bfloat16]
FORMATS = [(8, False), (8, True), (4, False), (4, True)]
GROUP = 32


@pytest.fixture(params=ops.isa_levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa("auto")


@pytest.fixture(params=FORMATS, ids=lambda f: f"int{f[0]}{'+min' if f[1] else ''}")
def quant(request: pytest.FixtureRequest) -> tuple[int, bool]:
    bits, has_minimums = request.param
    return bits, has_minimums


@dataclass
class Weight:
    bits: int
    values: Tensor
    scales: Tensor
    minimums: Tensor | None

    def packed(self) -> Tensor:
        return ops.pack_linear_quant(self.values, self.scales, self.minimums, self.bits)

    def dense(self) -> Tensor:
        """[out_features, in_features], float64."""
        k = self.values.shape[1]

        def per_value(tensor: Tensor) -> Tensor:
            return tensor.double().repeat_interleave(GROUP, 1)[:, :k]

        if self.minimums is not None:
            return per_value(self.scales) * self.values + per_value(self.minimums)
        return per_value(self.scales) * (self.values.double() - (128 if self.bits == 8 else 8))


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight_of(n: int, k: int, quant: tuple[int, bool]) -> Weight:
    bits, has_minimums = quant
    generator = torch.Generator().manual_seed(1)
    values = torch.randint(0, 1 << bits, (n, k), generator=generator, dtype=torch.uint8)
    groups = -(-k // GROUP)
    scales = random(n, groups, seed=2).mul(0.01).half()
    return Weight(bits, values, scales, random(n, groups, seed=3).half() if has_minimums else None)


def rounded(x: Tensor) -> Tensor:
    """x as the op sees it: [rows, in_features], float64."""
    k = x.shape[1]
    groups = functional.pad(x.float(), (0, -k % GROUP)).view(len(x), -1, GROUP)
    size = groups.abs().amax(2, keepdim=True)
    integers = torch.where(size > 0, (groups * torch.div(torch.full_like(size, 127), size)).round(), torch.zeros(()))
    scale = size * (torch.tensor(1.0) / 127)
    return (integers.double() * scale.double()).flatten(1)[:, :k]


def error_bound(x: Tensor, dense: Tensor, bias: Tensor | None, dtype: torch.dtype, exact: Tensor) -> Tensor:
    sizes = x.abs() @ dense.abs().T * 4 + (0 if bias is None else bias.abs()) + 1e-30
    bound = sizes * 2.0**-24 * (8 + x.shape[1] / GROUP)
    return bound + exact.abs() * 2.0**-8 if dtype == torch.bfloat16 else bound


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 1), (1, 32, 32), (3, 33, 31), (5, 60, 1000), (7, 100, 60), (4, 64, 7), (13, 96, 576), (25, 100, 33),
     (64, 96, 544), (300, 70, 45)],
)  # fmt: skip
def test_against_its_definition(m: int, n: int, k: int, dtype: torch.dtype, quant: tuple[int, bool]) -> None:
    weight, x, bias = weight_of(n, k, quant), random(m, k, dtype=dtype), random(n, seed=4)
    exact = rounded(x) @ weight.dense().T
    packed = weight.packed()
    got = ops.linear_quant(x, packed, None, n)
    assert got.shape == (m, n)
    assert got.dtype == dtype
    assert ((got.double() - exact).abs() <= error_bound(rounded(x), weight.dense(), None, dtype, exact)).all()
    exact = exact + bias.double()
    wide = ops.linear_quant(x, packed, bias, n, out_dtype=torch.float32)
    bound = error_bound(rounded(x), weight.dense(), bias, torch.float32, exact)
    assert ((wide.double() - exact).abs() <= bound).all()
    assert torch.equal(ops.linear_quant(x, packed, bias, n), wide.to(dtype))


def test_no_further_from_the_product_than_rounding_x_allows(quant: tuple[int, bool]) -> None:
    weight, x = weight_of(64, 576, quant), random(9, 576)
    exact = x.double() @ weight.dense().T
    steps = x.double().view(9, -1, GROUP).abs().amax(2) / 127  # [9, groups]
    per_group = weight.dense().abs().view(64, -1, GROUP).sum(2)  # [64, groups]
    got = ops.linear_quant(x, weight.packed(), None, 64)
    assert ((got.double() - exact).abs() <= steps / 2 @ per_group.T * 1.001).all()


def test_the_largest_integers(quant: tuple[int, bool]) -> None:
    """Where 16-bit sums of products would saturate."""
    bits, has_minimums = quant
    for value in (0, (1 << bits) - 1):
        ones = torch.ones(40, 18, dtype=torch.float16)
        weight = Weight(bits, torch.full((40, 576), value, dtype=torch.uint8), ones, -ones if has_minimums else None)
        x = torch.cat((torch.full((1, 576), 127.0), torch.full((1, 576), -127.0)))
        got = ops.linear_quant(x, weight.packed(), None, 40)
        assert torch.equal(got.double(), x.double() @ weight.dense().T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(100, 61), (96, 64)])
def test_a_row_does_not_know_its_neighbours(n: int, k: int, dtype: torch.dtype, quant: tuple[int, bool]) -> None:
    x, packed, bias = random(600, k, dtype=dtype), weight_of(n, k, quant).packed(), random(n, seed=2)
    alone = torch.cat([ops.linear_quant(x[i : i + 1], packed, bias, n) for i in range(600)])
    for m in [*range(1, 66), 95, 96, 97, 255, 256, 257, 511, 512, 513, 600]:
        assert torch.equal(ops.linear_quant(x[:m], packed, bias, n), alone[:m]), m
    order = torch.randperm(600, generator=torch.Generator().manual_seed(3))
    assert torch.equal(ops.linear_quant(x[order], packed, bias, n), alone[order])
    assert torch.equal(ops.linear_quant(x[250:263], packed, bias, n), alone[250:263])


def test_every_row_count_at_a_model_shape(level: str, quant: tuple[int, bool]) -> None:
    x, packed = random(600, 1536, dtype=torch.bfloat16), weight_of(96, 1536, quant).packed()
    whole = ops.linear_quant(x, packed, None, 96)
    for m in range(1, 600, 7 if level in ("avx512", "avx512_bf16") else 97):
        assert torch.equal(ops.linear_quant(x[600 - m :], packed, None, 96), whole[600 - m :]), m


@pytest.mark.parametrize("m", [1, 16, 200])
def test_thread_count_changes_nothing(m: int, quant: tuple[int, bool]) -> None:
    x, packed = random(m, 576, dtype=torch.bfloat16), weight_of(2000, 576, quant).packed()
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(ops.linear_quant(x, packed, None, 2000))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_levels_agree(level: str, quant: tuple[int, bool]) -> None:
    x, weight = random(11, 300), weight_of(70, 300, quant)
    packed = weight.packed()
    got = ops.linear_quant(x, packed, None, 70)
    ops.set_isa("portable")
    assert torch.equal(weight.packed(), packed)
    torch.testing.assert_close(got, ops.linear_quant(x, packed, None, 70), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strided_inputs(dtype: torch.dtype, quant: tuple[int, bool]) -> None:
    wide, weight = random(20, 300, dtype=dtype), weight_of(80, 300, quant)
    groups = slice(1, 3)
    minimums = None if weight.minimums is None else weight.minimums[:, groups].contiguous()
    cut = Weight(weight.bits, weight.values[:, 7:68], weight.scales[:, groups].contiguous(), minimums)
    whole = Weight(weight.bits, cut.values.contiguous(), cut.scales, minimums)
    assert torch.equal(cut.packed(), whole.packed())
    x = wide[:, 100:161]
    got = ops.linear_quant(x, cut.packed(), None, 80)
    assert torch.equal(got, ops.linear_quant(x.contiguous(), cut.packed(), None, 80))
    every_third = ops.linear_quant(wide[::3, :61], cut.packed(), None, 80)
    assert torch.equal(every_third[2], ops.linear_quant(wide[6:7, :61], cut.packed(), None, 80)[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_bad_row_stays_alone(dtype: torch.dtype, quant: tuple[int, bool]) -> None:
    x, packed = random(30, 100, dtype=dtype), weight_of(64, 100, quant).packed()
    clean = ops.linear_quant(x, packed, None, 64)
    x[11] = torch.nan
    x[12, 3] = -torch.inf
    x[13, 99] = torch.nan
    got = ops.linear_quant(x, packed, None, 64)
    rest = [i for i in range(30) if i not in (11, 12, 13)]
    assert torch.equal(got[rest], clean[rest])
    assert got[11:14].isnan().all()


def test_very_small_and_very_large_rows(quant: tuple[int, bool]) -> None:
    weight = weight_of(40, 64, quant)
    rows = random(1, 64) * torch.tensor([[0.0], [1e-44], [1e-25], [1e30]])
    got = ops.linear_quant(rows, weight.packed(), None, 40)
    assert torch.equal(got[:2], torch.zeros(2, 40))
    exact = rounded(rows[2:]) @ weight.dense().T
    assert ((got[2:].double() - exact).abs() <= exact.abs().amax(1, keepdim=True) * 1e-5).all()


def test_a_sum_too_small_for_a_normal_number_is_rounded_too() -> None:
    """Two groups that nearly cancel: 127 - 126 times 1e-29 / 127 times the smallest scale."""
    values = torch.full((32, 64), 128, dtype=torch.uint8)
    values[:, 0], values[:, 32] = 129, 127
    packed = ops.pack_linear_quant(values, torch.full((32, 2), 2.0**-24, dtype=torch.float16), None, 8)
    x = torch.zeros(3, 64)
    x[1, [0, 33]], x[1, 32] = 1e-29, 1e-29 * 126 / 127
    x[2, 0] = torch.inf
    wide = ops.linear_quant(x.bfloat16(), packed, None, 32, out_dtype=torch.float32)
    got = ops.linear_quant(x.bfloat16(), packed, None, 32)
    assert 0 < float(wide[1, 0]) < 1e-38
    assert torch.equal(got[:2], wide[:2].bfloat16())
    assert got[2].isnan().all()


def test_no_rows() -> None:
    packed = weight_of(10, 8, (8, False)).packed()
    assert ops.linear_quant(torch.empty(0, 8), packed, None, 10).shape == (0, 10)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 32), (3, 16, 31), (5, 33, 100), (40, 100, 64)])
def test_a_gate_gives_the_bits_of_two_ops(
    m: int, n: int, k: int, activation: ops.ActivationKind, dtype: torch.dtype, quant: tuple[int, bool]
) -> None:
    weight, x, bias = weight_of(2 * n, k, quant), random(m, k, dtype=dtype), random(2 * n, seed=4)
    gated = ops.pack_linear_quant(weight.values, weight.scales, weight.minimums, weight.bits, gated=True)
    for b in (None, bias):
        both = ops.linear_quant(x, weight.packed(), b, 2 * n)
        expected = ops.ACTIVATE_AND_MULTIPLY[activation](both)
        assert torch.equal(ops.linear_quant(x, gated, b, n, activation=activation), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 31), (100, 61), (64, 96), (97, 576)])
def test_rows_of_a_table(n: int, k: int, dtype: torch.dtype, quant: tuple[int, bool]) -> None:
    weight = weight_of(n, k, quant)
    ids = torch.randint(0, n, (150,), generator=torch.Generator().manual_seed(5))
    got = ops.embed_quant(ids, weight.packed(), torch.empty(k, dtype=dtype), n)
    own = QuantisedWeight(weight.bits, weight.values, weight.scales, weight.minimums)  # type: ignore[arg-type]
    assert torch.equal(got, own.dense(dtype)[ids])
    assert ops.embed_quant(ids[:0], weight.packed(), torch.empty(k, dtype=dtype), n).shape == (0, k)


X, PACKED = torch.zeros(2, 40), weight_of(50, 40, (4, True)).packed()
VALUES, SCALES = torch.zeros(3, 40, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.float16)
IDS = torch.arange(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.linear_quant(X[0], PACKED, None, 50), r"linear_quant: x: wanted \[rows, in_features\]"),
        (lambda: ops.linear_quant(X[:, :32], PACKED, None, 50), "linear_quant: packed: wanted"),
        (lambda: ops.linear_quant(X, PACKED, None, 65), "linear_quant: packed: wanted"),
        (lambda: ops.linear_quant(X, PACKED, None, 0), "linear_quant: out_features: wanted at least 1"),
        (lambda: ops.linear_quant(X, PACKED.float(), None, 50), "linear_quant: packed: wanted uint8, got float32"),
        (
            lambda: ops.linear_quant(X, PACKED[:, :, 1:].contiguous(), None, 50),
            "packed: wanted a tensor from pack_",
        ),
        (lambda: ops.linear_quant(X.double(), PACKED, None, 50), "linear_quant: x: wanted float32 or bfloat16, got"),
        (lambda: ops.linear_quant(X.T.contiguous().T, PACKED, None, 50), "x: wanted elements of the last dimension"),
        (lambda: ops.linear_quant(X, PACKED, torch.zeros(49), 50), r"bias: wanted \[out_features\] = \[50\]"),
        (lambda: ops.linear_quant(X, PACKED, torch.zeros(50).half(), 50), "bias: wanted float32, got float16"),
        (lambda: ops.linear_quant(X, PACKED, None, 50, out_dtype=torch.bfloat16), "linear_quant: out_dtype: wanted"),
        (lambda: ops.linear_quant(X, PACKED, None, 50, activation="silu"), "linear_quant: packed: wanted"),
        (
            lambda: ops.linear_quant(X, PACKED, None, 25, activation="relu"),  # type: ignore[arg-type]
            "activation: wanted silu, gelu or gelu_tanh",
        ),
        (
            lambda: ops.linear_quant(X, PACKED, torch.zeros(25), 25, activation="silu"),
            r"bias: wanted \[2 \* out_features\] = \[50\]",
        ),
        (lambda: ops.embed_quant(IDS, PACKED, X[0], 65), "embed_quant: packed: wanted"),
        (lambda: ops.embed_quant(IDS, PACKED, X[0], 0), "embed_quant: vocab_size: wanted at least 1"),
        (lambda: ops.embed_quant(IDS, PACKED, X[0].double(), 50), "like: wanted float32 or bfloat16, got float64"),
        (lambda: ops.embed_quant(IDS, PACKED, X, 50), r"like: wanted \[hidden_size\]"),
        (lambda: ops.embed_quant(IDS.int(), PACKED, X[0], 50), "ids: wanted int64, got int32"),
        (lambda: ops.embed_quant(IDS + 47, PACKED, X[0], 50), "ids: wanted numbers below 50, got 50 at 3"),
        (lambda: ops.embed_quant(IDS - 1, PACKED, X[0], 50), "ids: wanted numbers below 50, got -1 at 0"),
        (lambda: ops.pack_linear_quant(VALUES, SCALES, None, 8, gated=True), "values: wanted an even number of rows"),
        (lambda: ops.pack_linear_quant(VALUES[0], SCALES, None, 8), "pack_linear_quant: values: wanted"),
        (lambda: ops.pack_linear_quant(VALUES[:0], SCALES, None, 8), "values: wanted at least one row"),
        (lambda: ops.pack_linear_quant(VALUES.float(), SCALES, None, 8), "values: wanted uint8, got float32"),
        (lambda: ops.pack_linear_quant(VALUES + 16, SCALES, None, 4), "values: wanted values from 0 to 15"),
        (lambda: ops.pack_linear_quant(VALUES, SCALES, None, 5), "bits: wanted 8 or 4, got 5"),
        (lambda: ops.pack_linear_quant(VALUES, SCALES.float(), None, 8), "scales: wanted float16, got float32"),
        (lambda: ops.pack_linear_quant(VALUES, SCALES[:, :1].contiguous(), None, 8), "scales: wanted"),
        (lambda: ops.pack_linear_quant(VALUES, SCALES, SCALES + torch.inf, 8), "minimums: wanted finite numbers"),
    ],
)
def test_wrong_arguments_are_named(call: object, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call()  # type: ignore[operator]
