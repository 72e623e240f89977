"""Instruction-set levels: what is offered, how one is chosen, and that levels do not leak into each other."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import ops
from tests.ops.paged import Batch, Shape

ORDER = ("portable", "avx2", "avx512", "avx512_bf16", "amx", "amx_emulated", "neon", "neon_bf16")


@pytest.fixture(autouse=True)
def best_level_again() -> Iterator[None]:
    yield
    ops.set_isa("auto")


def cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split(":")[1].split())


def test_levels_are_named_worst_to_best() -> None:
    levels = ops.isa_levels()
    assert levels[0] == "portable"
    assert list(levels) == [name for name in ORDER if name in levels]


@pytest.mark.skipif(platform.machine() != "x86_64" or not Path("/proc/cpuinfo").exists(), reason="x86-64 Linux only")
def test_offered_levels_are_what_the_processor_has() -> None:
    flags, levels = cpu_flags(), ops.isa_levels()
    assert ("avx2" in levels) == {"avx2", "fma", "f16c"}.issubset(flags)
    avx512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c"}
    assert ("avx512" in levels) == avx512.issubset(flags)
    assert ("avx512_bf16" in levels) == (avx512 | {"avx512_bf16"}).issubset(flags)
    assert ("amx" in levels) <= {"amx_tile", "amx_bf16"}.issubset(flags)


def test_the_best_level_is_chosen_and_never_an_emulated_one() -> None:
    ops.set_isa("auto")
    assert ops.isa() == [name for name in ops.isa_levels() if name != "amx_emulated"][-1]


def test_a_level_can_be_pinned() -> None:
    for name in ops.isa_levels():
        ops.set_isa(name)
        assert ops.isa() == name


def test_an_unknown_level_is_refused_and_changes_nothing() -> None:
    ops.set_isa("portable")
    with pytest.raises(RuntimeError, match=r"set_isa: name: wanted auto or one of portable.*got sse9"):
        ops.set_isa("sse9")
    assert ops.isa() == "portable"


def test_levels_agree_within_rounding() -> None:
    batch = Batch(Shape(), [300], [40], torch.float32)
    answers = []
    for name in ops.isa_levels():
        ops.set_isa(name)
        answers.append(batch.attend())
    for answer in answers[1:]:
        torch.testing.assert_close(answer, answers[0], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs binutils")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="for Arm cross_aarch64.sh looks")
def test_code_outside_the_levels_runs_on_any_x86_64() -> None:
    """An inline function compiled into two levels is merged by the linker into either copy; if it were the one with
    AVX in it, an older machine would die of it. So no wide register may appear outside the levels' own functions."""
    listing = subprocess.run(
        ["objdump", "-d", "-C", "--no-show-raw-insn", str(ops.LIBRARY)], capture_output=True, text=True, check=True
    ).stdout
    function, wide = "", set()
    for line in listing.splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
        elif ("%ymm" in line or "%zmm" in line) and not any(f"pagemill::{level}::" in function for level in ORDER[1:]):
            wide.add(function)
    assert listing.count("%zmm") > 100 or "avx512" not in ops.isa_levels()
    assert not wide
