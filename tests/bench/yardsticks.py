"""What the machine can do at most, measured in the run that is to be judged by it: two floors for an op's time.

Reading: a loop that only streams memory (256 MiB in huge pages). Computing: the level's multiply-add or dot
instruction on registers. Both are compiled on the spot from yardsticks.cpp, as the library's own kernels must not be
their own measure.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from engine import ops

Kind = Literal["float32", "bfloat16", "int8"]
KINDS: tuple[Kind, ...] = ("float32", "bfloat16", "int8")
AVX512 = ["-mavx2", "-mfma", "-mavx512f", "-mavx512vnni"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
FLAGS = {  # of the levels that have more than the compiler's default; amx's tiles are not measured
    "avx2": ["-mavx2", "-mfma"],
    "avx512": AVX512,
    "avx512_bf16": AVX512_BF16,
    "amx": AVX512_BF16,
    "amx_emulated": AVX512_BF16,
    "neon_bf16": ["-march=armv8.2-a+dotprod+bf16+i8mm"],
}


def compiler() -> str:
    return os.environ.get("CXX", "c++")


@functools.cache
def _library(level: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "yardsticks.so"
        source = Path(__file__).with_suffix(".cpp")
        flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", *FLAGS.get(level, [])]
        subprocess.run([compiler(), *flags, str(source), "-o", str(built)], check=True)
        library = ctypes.CDLL(str(built))
    library.instruction.argtypes, library.instruction.restype = [ctypes.c_char], ctypes.c_char_p
    library.operation_rate.argtypes, library.operation_rate.restype = [ctypes.c_char, ctypes.c_int], ctypes.c_double
    library.read_rate.argtypes, library.read_rate.restype = [ctypes.c_int], ctypes.c_double
    return library


@dataclass(frozen=True)
class Floors:
    """The least time an op can take, in microseconds."""

    reading: float
    computing: float

    def judge(self, taken: float) -> str:
        """How far above the higher one `taken` (microseconds) is; the letter says which that is."""
        floor, letter = max((self.reading, "B"), (self.computing, "F"))
        return f"floors {self.reading:8.1f} B {self.computing:8.1f} F  {taken / floor:5.2f} x {letter}"


@dataclass(frozen=True)
class Yardsticks:
    """Of one number of threads at the active instruction-set level."""

    threads: int
    read: float  # GB/s
    rates: dict[Kind, float]  # GFLOP/s, a multiply and an add being two
    instructions: dict[Kind, str]

    @classmethod
    def measure(cls, threads: int, kinds: tuple[Kind, ...] = KINDS) -> Yardsticks:
        library = _library(ops.isa())
        return cls(
            threads,
            library.read_rate(threads),
            {kind: library.operation_rate(kind[0].encode(), threads) for kind in kinds},
            {kind: library.instruction(kind[0].encode()).decode() for kind in kinds},
        )

    def floors(self, num_bytes: float, operations: float, kind: Kind) -> Floors:
        """num_bytes: what must come from memory; operations: multiplications and additions of the exact answer."""
        return Floors(num_bytes / self.read / 1e3, operations / self.rates[kind] / 1e3)

    def __str__(self) -> str:
        rates = ", ".join(f"{self.instructions[kind]} {rate:.0f} G/s" for kind, rate in self.rates.items())
        return f"threads {self.threads}: this machine reads {self.read:.1f} GB/s; {rates}"
