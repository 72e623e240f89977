"""What the self-check found, and where it is kept: in the user's cache directory, by everything that could change it.

Imports no transformers: a later start that finds a verdict with a recipe needs none.
"""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engine import ops
from engine.device import CPU, Device
from engine.models.fused_recipe import FusedRecipe
from engine.models.user_cache import cache_root, write_bytes

logger = logging.getLogger("pagemill.engine")

VERSION = 8  # of the check, the recipe and the fused decoder: raising it invalidates what is kept


@dataclass(frozen=True, slots=True)
class Verdict:
    """difference, control: relative to the largest logit. batch_invariant: rows kept their bits beside others."""

    difference: float
    control: float
    batch_invariant: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """recipe: of the fused decoder, if that is what passed. max_position: see LoadedModel."""

    verdict: Verdict
    max_position: int
    recipe: FusedRecipe | None


class VerdictStore:
    """Results of earlier starts. Losing them costs a check, never correctness."""

    def __init__(
        self, cache_dir: str | None, content_hash: str, dtype: torch.dtype, backend: str, device: Device = CPU
    ) -> None:
        library = ops.LIBRARY.stat()
        parts: tuple[object, ...] = (
            VERSION,
            content_hash,
            dtype,
            backend,
            ops.isa(),
            library.st_size,
            library.st_mtime_ns,
            torch.__version__,
            version("transformers"),
        )
        if device.is_cuda and ops.CUDA_LIBRARY is not None:
            kernels = ops.CUDA_LIBRARY.stat()
            parts += (device.name, device.capability, kernels.st_size, kernels.st_mtime_ns)
        name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
        self._path: Path = cache_root(cache_dir) / "self_check" / f"{name}.json"

    def load(self) -> Kept | None:
        try:
            digest, _, data = self._path.read_bytes().partition(b"\n")
            if digest != _digest(data):
                return None
            values = json.loads(data)
            recipe = values["recipe"]
            return Kept(
                Verdict(**values["verdict"]),
                int(values["max_position"]),
                None if recipe is None else FusedRecipe.from_json(recipe),
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def save(self, kept: Kept) -> None:
        verdict = kept.verdict
        values: dict[str, Any] = {
            "verdict": {
                "difference": verdict.difference,
                "control": verdict.control,
                "batch_invariant": verdict.batch_invariant,
            },
            "max_position": kept.max_position,
            "recipe": None if kept.recipe is None else kept.recipe.to_json(),
        }
        data = json.dumps(values).encode()
        try:
            write_bytes(self._path, _digest(data) + b"\n" + data)
        except OSError as error:
            logger.warning("The self-check's verdict could not be kept (%s); the next start repeats it.", error)


def _digest(data: bytes) -> bytes:
    """Tells a file that is whole from one that something has damaged."""
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()
