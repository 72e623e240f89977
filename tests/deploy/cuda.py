"""NVIDIA's toolkit on this machine, and for which devices a library has kernels."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
from pathlib import Path

Kernel = tuple[str, int]  # "code" for one architecture, or "PTX" that later ones compile for themselves; 80 is 8.0

# What the images and the wheel promise: A100, H200, and PTX for what comes after.
CUDA_TARGETS: set[Kernel] = {("code", 80), ("code", 90), ("PTX", 90)}

_FATBIN = struct.Struct("<IHHQ")  # magic, version, size of this header, size of what follows
_ENTRY = struct.Struct("<HHIQIIHHI")  # kind, version, size of this header, size of what follows, ..., architecture
_MAGIC = 0xBA55ED50
_KINDS = {1: "PTX", 2: "code"}


def cuda_toolkit() -> Path | None:
    """The folder with bin/nvcc; None if there is none."""
    found = shutil.which("nvcc")
    if found is None:
        return None
    asked = subprocess.run([found, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True).stderr
    top = re.search(r"^#\$ TOP=(.+)$", asked, re.MULTILINE)
    return Path(top[1].strip()).resolve() if top else None


def targets_of(library: Path) -> set[Kernel]:
    """What the library's fat binaries hold. nvcc comes without cuobjdump where only a compiler was wanted."""
    data = library.read_bytes()
    found: set[Kernel] = set()
    start = data.find(_MAGIC.to_bytes(4, "little"))
    while start >= 0:
        _, _, head, size = _FATBIN.unpack_from(data, start)
        at, end = start + head, start + head + size
        while at < end:
            kind, _, entry_head, entry_size, *_, architecture = _ENTRY.unpack_from(data, at)
            found.add((_KINDS[kind], architecture))
            at += entry_head + entry_size
        start = data.find(_MAGIC.to_bytes(4, "little"), end)
    return found
