"""A request's head, before it is believed: what two readers of it could take for different requests is refused, for
behind a proxy the second may be somebody else's."""

from __future__ import annotations

import re
from collections.abc import Sequence

from server.protocol.errors import ApiError

UPGRADE = re.compile(rb"\r\nupgrade(?=:)", re.IGNORECASE)


def without_upgrade(data: bytes) -> bytes:
    """A head without its offer to speak something else (Java's client offers HTTP/2 with its first request). It may be
    ignored (RFC 9110, 7.8); httptools would take the body for the other protocol's and lose it."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return UPGRADE.sub(b"\r\nX-Upgrade", head) + end + rest


def fault_of(headers: Sequence[tuple[bytes, bytes]], version: str) -> ApiError | None:
    """What is wrong with a head that httptools takes. headers: names in lower case. version: "1.1"."""
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings not in ([], [b"chunked"]):  # 400, not 501: anybody can send it, and a 5xx wakes somebody
        told = "The only transfer coding that is understood is chunked."
        return ApiError(400, told, code="unsupported_transfer_encoding")
    num_hosts = sum(name == b"host" for name, _ in headers)
    if num_hosts > 1 or (version == "1.1" and num_hosts < 1):  # RFC 9112, 3.2
        return ApiError(400, "A request needs one Host header.", code="invalid_http")
    return None
