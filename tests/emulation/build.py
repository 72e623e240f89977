"""Builds the emulated kernels: csrc/cuda/*.cu through the host's C++ compiler, beside the machine that runs them.

`python -m tests.emulation.build [--asan]` (or the CMake target `_emu`). An object older than its source or than any
header is compiled again. Knows compilers and files; knows nothing of what the kernels do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ("fiber.cpp", "machine.cpp", "memory.cpp", "warp.cpp")
FLAGS = (
    "-std=c++17", "-fPIC", "-fvisibility=hidden", "-DPAGEMILL_EMULATION", "-g1",
    "-Wall", "-Wextra", "-Wno-unknown-pragmas",
    "-ffp-contract=off",  # as nvcc's --fmad=false
)  # fmt: skip
ASAN_FLAGS = ("-fsanitize=address", "-fno-omit-frame-pointer")
JOBS = 2


@dataclass(frozen=True)
class Target:
    """What to build, and where. kernels: a folder of .cu and .cuh files, csrc/cuda or a changed copy of it."""

    folder: Path
    kernels: Path = ROOT / "csrc" / "cuda"
    extra: tuple[Path, ...] = ()
    asan: bool = False
    flags: tuple[str, ...] = ()

    @property
    def built(self) -> Path:
        return self.folder / "_emu.so"


def default_target(asan: bool = False) -> Target:
    return Target(ROOT / "build" / ("emulation-asan" if asan else "emulation"), asan=asan)


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def build(target: Target) -> Path:
    """The library, up to date. Raises RuntimeError with the compiler's words."""
    target.folder.mkdir(parents=True, exist_ok=True)
    kernels = sorted(target.kernels.glob("*.cu"))
    sources = [*(ROOT / "tests" / "emulation" / name for name in MACHINE), *target.extra, *kernels]
    headers = [*target.kernels.glob("*.cuh"), *(ROOT / "tests" / "emulation").glob("*.h"), Path(__file__)]
    newest = max(path.stat().st_mtime for path in headers)
    with ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(partial(_compile, target, newest), sources))
    if not target.built.exists() or any(o.stat().st_mtime > target.built.stat().st_mtime for o in objects):
        sanitizer = ASAN_FLAGS if target.asan else ()
        _run([compiler(), "-shared", *sanitizer, "-o", str(target.built), *map(str, objects)])
    return target.built


def _compile(target: Target, newest_header: float, source: Path) -> Path:
    made = target.folder / f"{source.name}.o"
    if made.exists() and made.stat().st_mtime > max(newest_header, source.stat().st_mtime):
        return made
    # variables nobody initialises get a pattern that is no sensible number
    pattern = ("-ftrivial-auto-var-init=pattern",) if source.suffix == ".cu" and _knows_pattern(compiler()) else ()
    optimise = ("-O1", *ASAN_FLAGS) if target.asan else ("-O2",)
    # `cuda/...` must be found in the copy first, when there is one
    include = ["-I", str(target.kernels.parent), "-I", str(ROOT / "csrc"), "-I", str(ROOT)]
    _run(
        [
            compiler(),
            *FLAGS,
            *pattern,
            *optimise,
            *target.flags,
            *include,
            "-x",
            "c++",
            "-c",
            str(source),
            "-o",
            str(made),
        ]
    )
    return made


def _knows_pattern(name: str) -> bool:
    probe = [name, "-ftrivial-auto-var-init=pattern", "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        print(done.stderr, file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description="build the emulated CUDA kernels")
    parser.add_argument("--asan", action="store_true", help="with AddressSanitizer")
    print(build(default_target(parser.parse_args().asan)))


if __name__ == "__main__":
    main()
