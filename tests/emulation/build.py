"""Builds the emulated kernels: csrc/cuda/*.cu through the host's C++ compiler, beside the machine that runs them.

`python -m tests.emulation.build [--asan]` (or the CMake target `_emu`). An object older than its source, or than a
header that it includes, is compiled again. Knows compilers and files; knows nothing of what the kernels do.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
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
    """What to build, and where. kernels: a folder of .cu files: csrc/cuda, a changed copy of it, or other kernels."""

    folder: Path
    kernels: Path = ROOT / "csrc" / "cuda"
    asan: bool = False
    flags: tuple[str, ...] = ()

    @property
    def built(self) -> Path:
        return self.folder / "_emu.so"

    @property
    def include(self) -> tuple[Path, ...]:
        """Where headers are looked for: `cuda/...` in the copy first, when there is one."""
        return self.kernels.parent, ROOT / "csrc", ROOT

    def machine(self) -> list[Path]:
        return [ROOT / "tests" / "emulation" / name for name in MACHINE]

    def sources(self) -> list[Path]:
        return [*self.machine(), *sorted(self.kernels.glob("*.cu"))]

    def object_of(self, source: Path) -> Path:
        return self.folder / f"{source.name}.o"


def default_target(asan: bool = False) -> Target:
    return Target(ROOT / "build" / ("emulation-asan" if asan else "emulation"), asan=asan)


def compiler() -> str:
    return os.environ.get("CXX", "c++")


def build(target: Target) -> Path:
    """The library, up to date. Raises RuntimeError with the compiler's words."""
    with _alone_in(target.folder), ThreadPoolExecutor(JOBS) as pool:
        objects = list(pool.map(functools.partial(compile_source, target), target.sources()))
        if not target.built.exists() or any(o.stat().st_mtime > target.built.stat().st_mtime for o in objects):
            link(target, objects)
    return target.built


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Two that build the same at the same time: the second waits, and finds it done."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compile_source(target: Target, source: Path) -> Path:
    """The object, up to date."""
    made = target.object_of(source)
    newest = max(path.stat().st_mtime for path in (Path(__file__), *reads(source, target.include)))
    if made.exists() and made.stat().st_mtime > newest:
        return made
    # variables nobody initialises get a pattern that is no sensible number
    pattern = ("-ftrivial-auto-var-init=pattern",) if source.suffix == ".cu" and _knows_pattern(compiler()) else ()
    optimise = ("-O1", *ASAN_FLAGS) if target.asan else ("-O2",)
    include = [word for folder in target.include for word in ("-I", str(folder))]
    flags = [*FLAGS, *pattern, *optimise, *target.flags, *include]
    whole = made.with_suffix(".new")  # a compiler that is ended leaves half an object
    _run([compiler(), *flags, "-x", "c++", "-c", str(source), "-o", str(whole)])
    return whole.replace(made)


def link(target: Target, objects: Sequence[Path]) -> None:
    """Of a template that several objects hold, the first one's is taken."""
    sanitizer = ASAN_FLAGS if target.asan else ()
    _run([compiler(), "-shared", *sanitizer, "-o", str(target.built), *map(str, objects)])


def reads(source: Path, include: tuple[Path, ...]) -> set[Path]:
    """source, and what it includes by `"..."`, and what that includes."""
    found: set[Path] = set()
    left = [source]
    while left:
        path = left.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^#include "(.+)"', path.read_text("utf-8"), re.MULTILINE):
            left += [folder / name for folder in include if (folder / name).exists()][:1]
    return found


@functools.cache
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
