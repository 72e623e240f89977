"""Fields and tools that change nothing here: logged once each, and named in a response header, so that nothing is
dropped without a trace. A strict server refuses fields that it does not know.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from pydantic import BaseModel
from starlette.requests import Request

from server.protocol.fields import unread

logger = logging.getLogger("pagemill.server")

HEADER = b"x-pagemill-ignored"
MAX_NAMES = 32  # in one header
MAX_NAME_CHARS = 64
MAX_LOGGED = 1000  # names in the life of the server: a client may think up new ones for ever
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]()/:-]")


class IgnoredFields:
    """One per application."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def find(self, wire: BaseModel) -> list[str]:
        """Names of what nobody reads of `wire`; in any thread. Raises InvalidRequest for an unknown field if the
        server is strict."""
        found = list(unread(wire))
        if self._strict:
            for field in found:
                if not field.is_hint:
                    raise field.refusal()
        return [field.name for field in found]

    def note(self, request: Request, names: Iterable[str]) -> None:
        """Names that the answer's header shall tell."""
        told: dict[str, None] = request.scope.setdefault("state", {}).setdefault("ignored", {})
        for name in names:
            shown = _ODD.sub("?", name[:MAX_NAME_CHARS])
            if len(told) < MAX_NAMES:
                told[shown] = None
            if shown not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(shown)
                logger.info("ignored, here and from now on", extra={"fields": {"field": shown}})


def header_value(names: Iterable[str]) -> bytes:
    return ", ".join(names).encode("ascii", "replace")
