"""Bodies of requests in the log, for whoever asks for it (--enable-log-requests): cut short, in one line, no keys."""

from __future__ import annotations

import logging
import re

from starlette.types import Scope

from server.logs import REQUEST_LOGGER, clean
from server.middleware import header

logger = logging.getLogger(REQUEST_LOGGER)

HIDDEN = "[hidden]"
MAX_KEY = 512  # bytes; where a body is cut to be logged, none that is shorter may be cut in two
FIELD = re.compile(r"""("([^"\\]*)"\s*:\s*)"(?:[^"\\]|\\.)*"?""", re.DOTALL)  # of JSON, with a text, maybe cut short
SECRET = re.compile(r"authorization|api[-_]?key|secret|password|access[-_]?token", re.IGNORECASE)


def tell(scope: Scope, content: bytes, num_chars: int) -> None:
    """One line with the first `num_chars` characters of a body, if its sender may use the model."""
    state = scope.get("state", {})
    if not state.get("let_in", False):
        return
    num_read = 4 * num_chars + MAX_KEY
    shown = _without_keys(content[:num_read].decode(errors="replace"), scope)
    if len(content) > num_read:
        shown = shown[:-MAX_KEY]  # which may be half a key
    line = {"id": state.get("request_id", ""), "bytes": len(content), "body": clean(shown, num_chars)}
    logger.info("request body", extra={"fields": line})
    state["id_given"] = True  # it keeps that name, so that its other line has it too


def _without_keys(text: str, scope: Scope) -> str:
    """Without the key that the request came with, and without the texts of fields that are called like one (which a
    client passes on to tools)."""
    for name in (b"authorization", b"x-api-key"):
        for word in (header(scope, name) or b"").decode("latin-1").split():
            if len(word) > len("bearer"):
                text = text.replace(word, HIDDEN)
    return FIELD.sub(lambda found: f'{found[1]}"{HIDDEN}"' if SECRET.search(found[2]) else found[0], text)
