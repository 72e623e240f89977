"""How an API key is kept: keys.py says why this is enough. Imports nothing that takes time: the settings need it."""

from __future__ import annotations

import hashlib


def digest_of(key: bytes) -> bytes:
    """32 bytes, SHA-256."""
    return hashlib.sha256(key).digest()
