"""Fields and tools that change nothing here: logged once each, and named in a response header, so that nothing is
dropped without a trace. A strict server refuses fields that it does not know.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from itertools import islice

from pydantic import BaseModel
from starlette.requests import Request

from server.protocol.fields import unread

logger = logging.getLogger("pagemill.server")

HEADER = b"x-pagemill-ignored"
MAX_HEADER_CHARS = 1000  # of the names told; proxies take headers of some kilobytes in all
MAX_NAME_CHARS = 64
MAX_NAMES = 1000  # of one request that are looked at; further ones are not even counted
MAX_LOGGED = 1000  # names in the life of the server: a client may think up new ones for ever
_ODD = re.compile(r"[^A-Za-z0-9_.\[\]()/:-]")


class Names:
    """What was ignored of one request, as the header of its answer tells it: some names, and how many more."""

    __slots__ = ("_num_chars", "_num_more", "_shown")

    def __init__(self) -> None:
        self._shown: dict[str, None] = {}
        self._num_chars = 0
        self._num_more = 0

    def __bool__(self) -> bool:
        return bool(self._shown)

    def add(self, name: str) -> None:
        """name: printable ASCII."""
        if name in self._shown:
            return
        if self._num_more or self._num_chars + len(name) + 2 > MAX_HEADER_CHARS:
            self._num_more += 1  # may count a name twice that two readers of the body tell of
            return
        self._shown[name] = None
        self._num_chars += len(name) + 2

    def header(self) -> bytes:
        """The header's value: `a, b, and 3 more`."""
        more = [f"and {self._num_more} more"] if self._num_more else []
        return ", ".join([*self._shown, *more]).encode("ascii")


class IgnoredFields:
    """One per application."""

    def __init__(self, *, strict: bool) -> None:
        self._strict = strict
        self._logged: set[str] = set()

    def find(self, wire: BaseModel) -> list[str]:
        """Names of what nobody reads of `wire`, each once; in any thread. Raises InvalidRequest for an unknown field
        if the server is strict."""
        found: dict[str, None] = {}
        for field in unread(wire):
            if self._strict and not field.is_hint:
                raise field.refusal()
            found[field.name[:MAX_NAME_CHARS]] = None
            if len(found) == MAX_NAMES:
                break
        return list(found)

    def note(self, request: Request, names: Iterable[str]) -> None:
        """Names that the answer's header shall tell."""
        told: Names = request.scope.setdefault("state", {}).setdefault("ignored", Names())
        for name in islice(names, MAX_NAMES):
            shown = _ODD.sub("?", name[:MAX_NAME_CHARS]) or "?"
            told.add(shown)
            if shown not in self._logged and len(self._logged) < MAX_LOGGED:
                self._logged.add(shown)
                logger.info("ignored, here and from now on", extra={"fields": {"field": shown}})
