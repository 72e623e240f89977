"""Which attention an engine uses: `--attention-backend`."""

from __future__ import annotations

import logging

from engine.attention.base import AttentionBackend
from engine.attention.flash import LibraryAttention
from engine.attention.libraries import Library, flash_attention, torch_varlen
from engine.attention.native import NativeAttention
from engine.config import AttentionName, StartError
from engine.device import Device

logger = logging.getLogger("pagemill.engine")


def select(name: AttentionName, device: Device) -> AttentionBackend:
    """Raises StartError if it is not to be had here."""
    native = NativeAttention()
    if name == "native":
        return native
    if not device.is_cuda:
        raise StartError(f"--attention-backend {name} needs a CUDA device, and this engine computes on the CPU.")
    library: Library = flash_attention() if name == "flash-attn" else torch_varlen()
    logger.warning(
        "attention backend %s: what a request gets may depend on other requests and on what is cached, as it never "
        "does with native.",
        name,
    )
    return LibraryAttention(library, native)
