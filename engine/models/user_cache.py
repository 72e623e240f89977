"""The user's cache directory: what costs seconds to derive from a model file and may be thrown away at any time.

    <root>/hashes/<identity>            content hash of a file, remembered by path, size, inode and times
    <root>/gguf/<content hash>/...      dequantised weights of one GGUF file
    <root>/self_check/<key>.json        what the self-check found, and the fused decoder's recipe

Nothing in here is trusted because it is there: readers check what they find and rebuild it, and every write goes to
a temporary file that replaces the target in one step. A cache that cannot be written costs time, never a start.

Content hashes cover whole files. BLAKE2b reads about 1 GB/s, so a 98 MB file costs 0.1 s and a 10 GB file 10 s, on
the first start only, where deriving the weights takes far longer; later starts find the hash by the file's
identity. Sampling parts of a file would be faster once and could confuse two fine-tunes of one model for ever.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from engine.config import StartError

logger = logging.getLogger(__name__)

_CHUNK = 4 << 20  # bytes read at once while hashing
_ABANDONED_S = 3600.0  # a temporary file that nobody wrote to for so long belongs to a process that was killed
_SPARE_BYTES = 1 << 30  # room on the disk that the cache leaves to others


def cache_root(cache_dir: str | None) -> Path:
    """The directory that holds everything derived; the settings pass a platform's own place as `cache_dir`. Raises
    StartError if there is no home directory to put it in."""
    try:
        return Path(cache_dir).expanduser() if cache_dir else Path.home() / ".cache" / "pagemill"
    except RuntimeError as error:
        raise StartError("There is no home directory for the cache: name one with --cache-dir.") from error


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Lets `write` fill a temporary file beside `path`, then puts it in place. Raises OSError; then `path` is as it
    was and nothing is left over."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(path)
    handle, temporary = tempfile.mkstemp(prefix=path.name + ".", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def check_room(root: Path, num_bytes: int) -> None:
    """Raises OSError if `num_bytes` more under `root` would leave the disk nearly full."""
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < num_bytes + _SPARE_BYTES:
        raise OSError(errno.ENOSPC, f"{num_bytes / 1e9:.1f} GB wanted, {free / 1e9:.1f} GB free")


def write_bytes(path: Path, data: bytes) -> None:
    """`write_atomically` for what is at hand already."""

    def write(file: BinaryIO) -> None:
        file.write(data)

    write_atomically(path, write)


def _remove_abandoned(path: Path) -> None:
    for part in path.parent.glob(f"{path.name}.*.part"):
        with contextlib.suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


def content_hash(path: Path, root: Path) -> str:
    """Hex BLAKE2b-256 of the file's bytes. Raises OSError if it cannot be read."""
    path = path.resolve()
    stat = path.stat()
    identity = f"{path}\0{stat.st_size}\0{stat.st_ino}\0{stat.st_mtime_ns}\0{stat.st_ctime_ns}"
    remembered = root / "hashes" / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        known = remembered.read_text("ascii")
        if len(bytes.fromhex(known)) == 32:
            return known
    digest = hashlib.blake2b(digest_size=32)
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    text = digest.hexdigest()
    try:
        write_bytes(remembered, text.encode("ascii"))
    except OSError as error:
        logger.warning("The cache under %s cannot be written (%s); the next start takes longer.", root, error)
    return text
