"""Weights of 8 and 4 bits: rounding, joining, and a GGUF file's blocks as they are."""

from __future__ import annotations

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from engine import ops
from engine.config import StartError
from engine.models.dequantize import dequantize
from engine.models.gguf_quantised import own_format, own_precision
from engine.models.quantised import RUN, Bits, QuantisedWeight, join, quantise
from tests.engine.test_gguf_dequantize import random_blocks

BITS: list[Bits] = [8, 4]
Kind = GGMLQuantizationType


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("k", [32, 45, 7, 576])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e3])
def test_rounds_to_the_nearest_value(bits: Bits, k: int, size: float) -> None:
    weight = random(20, k) * size
    rounded = quantise(weight, bits)
    steps = rounded.scales.float().repeat_interleave(32, 1)[:, :k]
    assert ((rounded.dense(torch.float32) - weight).abs() <= steps * 0.5001 + size * 1e-6).all()
    extent = weight.abs().amax(1) / 127 if bits == 8 else (weight.amax(1) - weight.amin(1)) / 15
    assert (steps <= extent[:, None] * 1.01 + 1e-6).all()
    assert rounded.shape == weight.shape
    assert int(rounded.values.max()) < 1 << bits


def test_error_is_small_beside_the_weights() -> None:
    weight = random(64, 576)
    errors = [float((quantise(weight, bits).dense(torch.float32) - weight).norm() / weight.norm()) for bits in BITS]
    assert errors[0] < 0.006
    assert 0.02 < errors[1] < 0.1


@pytest.mark.parametrize("bits", BITS)
def test_what_is_constant_or_zero_stays_so(bits: Bits) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.5
    weight[2, 40] = -2.0
    got = quantise(weight, bits).dense(torch.float32)
    assert torch.equal(got[0], weight[0])
    torch.testing.assert_close(got, weight, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e9])
def test_what_no_scale_can_hold_is_refused(bits: Bits, bad: float) -> None:
    weight = random(4, 64)
    weight[2, 3] = bad
    with pytest.raises(StartError, match="not finite or too large"):
        quantise(weight, bits)


@pytest.mark.parametrize("kinds", [("Q4_0", "Q4_1"), ("Q8_0", "Q4_0"), ("Q4_1", "Q5_1", "Q8_0"), ("Q8_0", "Q5_0")])
def test_joined_rows_are_the_parts_exactly(kinds: tuple[str, ...]) -> None:
    parts = [weight_of(Kind[kind], 3, 64) for kind in kinds]
    joined = join(parts)
    assert joined.bits == max(part.bits for part in parts)
    dense = torch.cat([part.dense(torch.float32) for part in parts])
    torch.testing.assert_close(joined.dense(torch.float32), dense, rtol=1e-6, atol=1e-6 * float(dense.abs().max()))
    assert joined.pack().shape[0] == 1


def test_joining_keeps_the_narrowest_form() -> None:
    assert join([weight_of(Kind.Q8_0, 3, 64), weight_of(Kind.Q5_0, 3, 64)]).minimums is None
    assert join([weight_of(Kind.Q4_1, 3, 64), weight_of(Kind.Q4_K, 3, 256)][:1]).bits == 4


@pytest.mark.parametrize("bits", BITS)
def test_a_weight_is_rounded_in_runs(bits: Bits) -> None:
    """More rows than one run has, and rows longer than a run."""
    for shape in ((5000, 40), (3, RUN + 40)):
        weight = random(*shape, seed=2)
        whole = quantise(weight, bits)
        for first in range(0, shape[0], 1000):
            part = quantise(weight[first : first + 10], bits)
            assert torch.equal(whole.dense(torch.float32)[first : first + 10], part.dense(torch.float32))


@pytest.mark.parametrize(
    "kind",
    ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "Q8_0", "Q6_K", "Q3_K", "Q2_K", "IQ4_NL"],
)
def test_a_format_is_known_before_anything_is_read(kind: str) -> None:
    data, _ = blocks_of(Kind[kind], 4, 512)
    weight = own_precision(data, Kind[kind], (4, 512))
    assert (None if weight is None else weight.format) == own_format(Kind[kind])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("rows", "columns"), [(2, 7), (64, 64), (66, 100), (150, 33)])
def test_a_packed_size_is_known_before_it_is_packed(rows: int, columns: int, bits: Bits) -> None:
    weight = quantise(random(rows, columns), bits)
    for each in (weight, weight.widened(8)):
        for gated in (False, True):
            assert each.pack(gated=gated).nbytes == each.format.packed_bytes(rows, columns, gated=gated)


def weight_of(kind: Kind, rows: int, columns: int) -> QuantisedWeight:
    data, _ = blocks_of(kind, rows, columns)
    weight = own_precision(data, kind, (rows, columns))
    assert weight is not None
    return weight


def blocks_of(kind: Kind, rows: int, columns: int) -> tuple[object, Tensor]:
    """(bytes, what they mean in float32)"""
    block_size, _ = GGML_QUANT_SIZES[kind]
    data = random_blocks(kind, rows * columns // block_size).reshape(-1)
    return data, dequantize(data, kind, (rows, columns), torch.float32)


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q4_0", 4), ("Q4_1", 4), ("Q5_0", 8), ("Q5_1", 8), ("Q8_0", 8)], ids=lambda value: str(value)
)
def test_plain_formats_lose_nothing(kind: str, bits: int) -> None:
    data, dense = blocks_of(Kind[kind], 40, 1 << 11)  # more than one run
    weight = own_precision(data, Kind[kind], (40, 1 << 11))
    assert weight is not None
    assert weight.bits == bits
    assert torch.equal(weight.dense(torch.float32), dense)


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4), ("Q5_K", 8)])
def test_k_formats_lose_less_than_bfloat16_does(kind: str, bits: int) -> None:
    data, dense = blocks_of(Kind[kind], 40, 1 << 11)
    weight = own_precision(data, Kind[kind], (40, 1 << 11))
    assert weight is not None
    assert weight.bits == bits
    ours = (weight.dense(torch.float32) - dense).norm()
    assert 0 < ours < (dense.bfloat16().float() - dense).norm() / 2


@pytest.mark.parametrize("kind", ["Q6_K", "Q3_K", "Q2_K", "IQ4_NL"])
def test_other_formats_are_rounded_to_eight_bits(kind: str) -> None:
    data, dense = blocks_of(Kind[kind], 8, 512)
    weight = own_precision(data, Kind[kind], (8, 512))
    assert weight is not None
    assert torch.equal(weight.values, quantise(dense, 8).values)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_floating_point_is_no_quantised_weight(kind: str) -> None:
    data = random_blocks(Kind[kind], 64).reshape(-1)
    assert own_precision(data, Kind[kind], (2, 32)) is None


@pytest.mark.parametrize("bits", BITS)
def test_the_product_is_that_of_the_dense_weight(bits: Bits) -> None:
    weight, x = quantise(random(50, 96, seed=1), bits), random(5, 96)
    got = ops.linear_quant(x, weight.pack(), None, 50)
    exact = x.double() @ weight.dense(torch.float32).double().T
    assert float((got - exact).norm() / exact.norm()) < 0.01
