"""The name of a block's content: a keyed hash chain over (parent, tokens), started by what must never be shared.

Knows bytes and token ids; knows no blocks, no sequences. Guarantees:
- equal names mean equal tokens, equal tokens before them, and equal extra keys (cache salt, adapter);
- names cannot be predicted or collided from outside: blake2b under a key drawn per process;
- extra keys are tagged and length-prefixed, so a salt never reads as an adapter name.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 16


class BlockHasher:
    """key: at most 64 bytes; None draws one. The same key gives the same names (a disk tier will want that)."""

    def __init__(self, key: bytes | None = None) -> None:
        key = secrets.token_bytes(32) if key is None else key
        self._root = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"pagemill-root")
        self._block = blake2b(digest_size=DIGEST_BYTES, key=key, person=b"pagemill-block")

    def root(self, *, cache_salt: str = "", adapter: str = "") -> bytes:
        """Parent of a sequence's first block: sequences share blocks only under the same root."""
        state = self._root.copy()
        for tag, value in ((b"salt", cache_salt), (b"adapter", adapter)):
            if value:
                data = value.encode("utf-8", "surrogatepass")
                state.update(tag + b"=" + len(data).to_bytes(8, "little") + data)
        return state.digest()

    def block(self, parent: bytes, token_ids: Sequence[int]) -> bytes:
        """Name of the block that holds `token_ids` after the block (or root) named `parent`."""
        state = self._block.copy()
        state.update(parent)
        state.update(array("q", token_ids).tobytes())
        return state.digest()
