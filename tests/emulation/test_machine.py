"""The emulated device itself: it computes what CUDA computes, and it reports what CUDA forbids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.emulation.build import ROOT, Target, build
from tests.emulation.launchers import CODES, EmulatedLaunchers

CASES = Path(__file__).parent  # machine_cases.cu
TARGETS = {
    "own-switch": Target(ROOT / "build" / "emulation-cases", CASES),
    "ucontext": Target(ROOT / "build" / "emulation-ucontext", CASES, flags=("-DPAGEMILL_UCONTEXT",)),
}


@pytest.fixture(scope="module", params=["own-switch", pytest.param("ucontext", marks=pytest.mark.slow)])
def library(request: pytest.FixtureRequest) -> EmulatedLaunchers:
    return EmulatedLaunchers(build(TARGETS[request.param]))


@pytest.fixture(params=[0, 1, 2])
def machine(library: EmulatedLaunchers, request: pytest.FixtureRequest) -> EmulatedLaunchers:
    library.set_seed(request.param)
    return library


def test_a_barrier_makes_shared_memory_visible(machine: EmulatedLaunchers) -> None:
    out = torch.zeros(5, 128)
    machine.launch("case_rotate_block", out, 5, 128, True)
    assert torch.equal(out, ((torch.arange(128) + 32) % 128).float().expand(5, -1))


def test_a_missing_barrier_shows_as_nan(machine: EmulatedLaunchers) -> None:
    out = torch.zeros(5, 128)
    machine.launch("case_rotate_block", out, 5, 128, False)
    assert out.isnan().any()


def test_warp_operations(machine: EmulatedLaunchers) -> None:
    out = torch.zeros(32)
    machine.launch("case_lanes", out)
    i = torch.arange(32)
    down, up = (i + 1).clamp(max=31), torch.where(i < 2, i, i - 2)
    assert torch.equal(out, (i ^ 5) + 100 + down * 1000 + up * 1e5 + 3 * 0.125)


def test_counting_barriers(machine: EmulatedLaunchers) -> None:
    out = torch.zeros(96)
    machine.launch("case_count", out)
    assert (out == 1).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_matrix_product(machine: EmulatedLaunchers, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, n, generator=generator) for n in (16, 8))
    out = torch.zeros(16, 8)
    machine.launch("case_product", a, b, out, CODES[dtype])
    want = 2 * (a.to(dtype).double() @ b.to(dtype).double())
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def copied(machine: EmulatedLaunchers, pending: int, valid: int = 64, shift: int = 0) -> tuple[Tensor, Tensor]:
    source, out = torch.arange(512.0), torch.zeros(64)
    machine.launch("case_copy", source, out, valid, pending, shift)
    return out, source[3::8]


@pytest.mark.parametrize("pending", [0, 1])
def test_copies_arrive_in_their_wait(machine: EmulatedLaunchers, pending: int) -> None:
    out, want = copied(machine, pending)
    assert torch.equal(out, want)


def test_copies_not_waited_for_are_nan(machine: EmulatedLaunchers) -> None:
    out, _ = copied(machine, 2)
    assert out.isnan().all()


def test_invalid_copies_are_zeros(machine: EmulatedLaunchers) -> None:
    out, want = copied(machine, 0, valid=40)
    assert torch.equal(out[:40], want[:40])
    assert (out[40:] == 0).all()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            0,
            r"misbehave: deadlock in block \(0, 0, 0\): 32 threads at its end, the first is 32; 32 threads at sync_bl",
        ),
        (1, "deadlock.* 31 threads at shuffle, the first is 0"),
        (2, "is in shuffle.*, other lanes of its warp are in shuffle"),
        (3, "load_matrix: shared address 4 is not a multiple of 16"),
        (4, "load_matrix: shared address 4096, of 4096 bytes"),
        (5, "shared memory was written past its end"),
        (6, "ends with 1 asynchronous copies it did not wait for"),
        (7, "load_16: .* is not a multiple of 16"),
        (8, r"block \(0, 0, 0\) waits for \d+ threads at barrier 1, others for|deadlock.* 32 threads at sync_threads"),
        (9, "takes the shared address of what is not in shared memory"),
    ],
)
def test_misbehaviour_is_reported(machine: EmulatedLaunchers, what: int, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        machine.launch("case_misbehave", torch.zeros(64), what)
    machine.launch("case_misbehave", torch.zeros(64), -1)  # and the next launch is clean


def test_a_misaligned_copy_is_reported(machine: EmulatedLaunchers) -> None:
    with pytest.raises(RuntimeError, match=r"copy_async_16: shared address .* is not a multiple of 16"):
        copied(machine, 0, shift=8)


@pytest.mark.parametrize(
    ("blocks", "threads", "shared_bytes", "allowed", "message"),
    [
        (65536, 32, 0, 0, "a grid of 1 x 65536 x 1 blocks"),
        (0, 32, 0, 0, "a grid of 1 x 0 x 1 blocks"),
        (1, 48, 0, 0, "48 threads is not made of whole warps"),
        (1, 1056, 0, 0, "a block of 1056 threads"),
        (1, 64, 49153, 0, "49153 bytes of shared memory where 49152 are allowed"),
        (1, 64, 65536, 65535, "65536 bytes of shared memory where 65535 are allowed"),
        (1, 64, 0, 227 * 1024 + 1, "error 1"),
    ],
)
def test_limits(
    library: EmulatedLaunchers, blocks: int, threads: int, shared_bytes: int, allowed: int, message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        library.launch("case_launch", torch.zeros(1024), blocks, threads, shared_bytes, allowed)
    library.launch("case_launch", torch.zeros(1024), 1, 64, 227 * 1024, 227 * 1024)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_conversions(library: EmulatedLaunchers, dtype: torch.dtype) -> None:
    """Every bfloat16 number, and floats close to the middle between two numbers of dtype."""
    wide = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    close = torch.arange(-(2**15), 2**15).float() / 2**15
    generator = torch.Generator().manual_seed(0)
    values = torch.cat([wide, close, close * 2**-7, torch.randn(50_000, generator=generator).exp() * 100])
    want = (values.clamp(-448, 448) if dtype == torch.float8_e4m3fn else values).to(dtype).float()
    got = torch.zeros_like(values)
    library.launch("case_convert", values, got, len(values), CODES[dtype])
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(), want.nan_to_num())


def test_exp2(library: EmulatedLaunchers) -> None:
    values = torch.tensor([0.0, -1.0, 0.5, -126.0, -127.0, -torch.inf])
    got = torch.zeros_like(values)
    library.launch("case_convert", values, got, len(values), 0)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.5, 2**0.5, 2**-126, 0.0, 0.0]), rtol=1e-6, atol=0)
