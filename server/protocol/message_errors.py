"""Failures in the words of Anthropic's Messages API, for its paths and its clients.

Knows no exceptions: `errors.py` asks it for a body where a request speaks that dialect.
"""

from __future__ import annotations

import orjson
from starlette.types import Scope

PATH = "/v1/messages"
VERSION_HEADER = b"anthropic-version"  # every client of that API sends it, whatever the path

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def speaks_messages(scope: Scope) -> bool:
    """Whether the sender of this HTTP request expects the Messages API."""
    path: str = scope.get("path", "")
    if path == PATH or path.startswith(PATH + "/"):
        return True
    return any(name == VERSION_HEADER for name, _ in scope.get("headers", ()))


def envelope(status: int, message: str, request_id: str | None) -> bytes:
    """{"type": "error", "error": {"type", "message"}, "request_id"}."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message}
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})
