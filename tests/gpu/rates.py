"""What this machine is, and the two rates everything else is held against: copying memory, multiplying matrices.

python -m tests.gpu.rates [--out FOLDER] [--dry]
"""

from __future__ import annotations

import hashlib
import platform
from importlib.metadata import version

import torch

from engine import ops
from tests.gpu.place import COPY_RATE, MATMUL_RATE, Place, measure, open_place


def main() -> None:
    place = open_place("rates", __doc__)
    tell_versions(place)
    copy(place)
    matmul(place)


def tell_versions(place: Place) -> None:
    tell = place.results.tell
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {version('transformers')}"
    tell("versions", "", note=versions)
    for library in (ops.LIBRARY, ops.CUDA_LIBRARY):
        if library is not None:
            digest = hashlib.blake2b(library.read_bytes(), digest_size=8).hexdigest()
            tell("library", "", note=f"{library.name} {digest}")
    if place.is_dry:
        tell("device", "", note=f"{platform.machine()}, level {ops.isa()}")
        return
    found = torch.cuda.get_device_properties(0)
    tell("device", "", note=f"{found.name}, {found.multi_processor_count} SMs, {found.total_memory / 2**30:.0f} GiB")


def copy(place: Place) -> None:
    """Device to device, as torch does it; bytes read and bytes written are both counted."""
    source = torch.ones(place.sized(1 << 31, 1 << 16), dtype=torch.uint8, device=place.device)
    target = torch.zeros_like(source)
    seconds, how = measure(place, [lambda: target.copy_(source)])
    place.results.tell(COPY_RATE, 2 * source.numel() / seconds / 1e9, "GB/s", note=how)


def matmul(place: Place) -> None:
    """Square, bfloat16, random data: zeros would run at a higher clock."""
    size = place.sized(8192, 64)
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=place.device) for _ in range(2))
    seconds, how = measure(place, [lambda: left @ right])
    place.results.tell(MATMUL_RATE, 2 * size**3 / seconds / 1e12, "TFLOP/s", note=how)


if __name__ == "__main__":
    main()
