"""Rings of whole keys, for tests."""

from __future__ import annotations

from collections.abc import Sequence

from server.digest import digest_of
from server.keys import KeyRing, read_clients


def load_keys(keys: Sequence[str], file: str | None) -> KeyRing:
    """keys: as --api-key has them; file: a key file."""
    return KeyRing(read_clients([digest_of(key.encode()) for key in keys], file))
