"""Whether what the other parts need is here: packages, the compiled ops, a first kernel.

    python -m tests.gpu.loaded [--out FOLDER] [--dry]

Exits with UNUSABLE_OPS if the ops do not load or compute, with 1 if packages are missing, each named in a line.
"""

from __future__ import annotations

import importlib
import sys

import torch

from tests.gpu.place import Place, open_place

UNUSABLE_OPS = 3  # to be built here
PACKAGES = (
    "fastapi", "gguf", "httptools", "jinja2", "llguidance", "orjson", "prometheus_client", "pydantic",
    "pydantic_settings", "pytest", "safetensors", "tokenizers", "tqdm", "transformers", "uvicorn", "uvloop",
)  # fmt: skip


def missing_packages() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            found.append(f"{name} ({error})")
    return found


def check_ops(place: Place) -> None:
    """Raises ImportError or RuntimeError if the ops do not load or the first kernel does not run."""
    ops = importlib.import_module("engine.ops")
    if not place.is_dry and ops.CUDA_LIBRARY is None:
        raise ImportError("there is no _C_cuda.so, or this torch has no CUDA")
    x = torch.randn(3, 256, dtype=torch.bfloat16)
    weight = torch.ones(256, dtype=torch.bfloat16)
    expected = ops.rms_norm(x, weight, 1e-6, "llama")
    got = ops.rms_norm(x.to(place.device), weight.to(place.device), 1e-6, "llama").cpu()
    if not torch.allclose(got.float(), expected.float(), atol=0.02):
        raise RuntimeError("rms_norm on the device differs from the CPU's")


def main() -> int:
    place = open_place("library", __doc__)
    missing = missing_packages()
    for line in missing:
        place.results.tell("missing package", line)
    try:
        check_ops(place)
    except (ImportError, OSError, RuntimeError) as error:
        place.results.tell("compiled ops", "unusable", note=str(error).splitlines()[0][:160])
        return UNUSABLE_OPS
    place.results.tell("compiled ops", "loaded, a first kernel ran")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
