"""Finds and loads the compiled ops: `_C`, which everything needs, and `_C_cuda`, the kernels for CUDA tensors.

Knows files; what the ops are is in engine/ops.py, decoder_ops.py and device_ops.py.
"""

from __future__ import annotations

import logging
import sysconfig
from pathlib import Path

import torch

logger = logging.getLogger("pagemill.engine")


def library_candidates(name: str = "_C.so") -> list[Path]:
    """Where a built library may lie: beside this file, in site-packages (editable install), in build/ (inner loop)."""
    here = Path(__file__).resolve().parent
    places = [here / name, Path(sysconfig.get_path("platlib")) / "engine" / name]
    return [p for p in [*places, *sorted((here.parent / "build").glob(f"*/{name}"))] if p.is_file()]


def load() -> Path:
    """Load the newest `_C`. Raises ImportError with one sentence if there is none."""
    newest = _newest("_C.so")
    if newest is None:
        raise ImportError("The compiled ops are missing: run `make setup` (or `pip install -e .`) to build csrc/.")
    torch.ops.load_library(str(newest))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return newest


def load_cuda() -> Path | None:
    """Load the newest `_C_cuda`, after `load`. None without one, or in a torch without CUDA, which has no use for it.

    It asks for no driver and starts nothing on a device. One that cannot be loaded is told in the log: the CPU's ops
    work without it."""
    newest = _newest("_C_cuda.so") if torch.version.cuda is not None else None
    if newest is None:
        return None
    try:
        torch.ops.load_library(str(newest))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except OSError as error:
        logger.warning("The kernels for CUDA devices cannot be loaded: %s", error)
        return None
    return newest


def _newest(name: str) -> Path | None:
    return max(library_candidates(name), key=lambda path: path.stat().st_mtime_ns, default=None)
