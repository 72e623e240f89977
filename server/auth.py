"""Who may ask: web pages of strange origins may not, and where there are keys every path but the open ones needs one.

Pure ASGI, as `middleware.py`.
"""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from server.keys import Account, KeyRing, is_good_for, scope_of
from server.keys import Scope as KeyScope
from server.middleware import Incoming, answer, header
from server.protocol.errors import ApiError


class OriginGate:
    """403 for what a browser sends on behalf of a page that is not ours: it could not read the answer, but it could
    spend our compute. Programs other than browsers tell no origin.

    allowed: origins that may, "*" for all. only_local: a page's own host name must be this machine's, for where no key
    is asked for and we listen on loopback, a name that an attacker's DNS turns to 127.0.0.1 must not be enough."""

    def __init__(self, app: ASGIApp, allowed: Collection[str], *, only_local: bool) -> None:
        self.app = app
        self._allowed = frozenset(origin.encode() for origin in allowed)
        self._only_local = only_local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        origin = header(scope, b"origin") if scope["type"] == "http" else None
        if origin is not None and not self._may_ask(origin, header(scope, b"host") or b""):
            message = "Pages of this origin may not call this server: see --cors-origins."
            await answer(ApiError(403, message, code="origin_not_allowed"), scope, Incoming(scope, receive), send)
            return
        await self.app(scope, receive, send)

    def _may_ask(self, origin: bytes, host: bytes) -> bool:
        if origin in self._allowed or b"*" in self._allowed:
            return True
        scheme, _, name = origin.lower().partition(b"://")
        if scheme not in (b"http", b"https") or name != host.lower():
            return False
        return not self._only_local or is_local(name.decode("latin-1"))


def is_local(host: str) -> bool:
    """Whether a name or an address, with or without a port, can only mean this machine."""
    try:
        name = host if host.count(":") > 1 and "[" not in host else urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Auth:
    """Unless the path is literally one of `open_paths`: 401 without a key, as bearer token or in x-api-key, where
    Anthropic's clients put it; 403 for a key that is not good for the path; 429 for a client that has too much in
    hand. An empty ring: everything passes but what needs the scope admin.

    Tells the routes `state.account`, whose the key is, and those outside `state.let_in`: whether the request is one
    that may use the model."""

    def __init__(self, app: ASGIApp, ring: KeyRing, open_paths: Collection[str]) -> None:
        self.app = app
        self._ring = ring
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self.app(scope, receive, send)
            return
        needed = scope_of(scope["path"])
        if not self._ring and needed != "admin":
            scope.setdefault("state", {})["let_in"] = needed == "inference"
            await self.app(scope, receive, send)
            return
        try:
            account = self._identify(scope, needed)
            if counts := needed == "inference" and scope["method"] == "POST":
                account.enter(time.monotonic())
        except ApiError as error:
            await answer(error, scope, Incoming(scope, receive), send)
            return
        try:
            await self.app(scope, receive, send)
        finally:
            if counts:
                account.leave()

    def _identify(self, scope: Scope, needed: KeyScope) -> Account:
        """Raises ApiError."""
        if not self._ring:
            message = "This needs an API key of the scope admin, and this server has none: see --api-key-file."
            raise ApiError(403, message, code="missing_scope")
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        given = [token] if scheme.lower() == b"bearer" else []
        if (key := header(scope, b"x-api-key")) is not None:
            given.append(key)
        account = self._ring.find(given)
        if account is None:
            message = "A valid API key is needed: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        client, state = account.client, scope.setdefault("state", {})
        state["account"] = account
        state.setdefault("log", {})["client"] = client.name
        if not is_good_for(client.scopes, scope["path"]):
            message = f"This API key is not good for this URL: it lacks the scope {needed}."
            raise ApiError(403, message, code="missing_scope")
        state["let_in"] = needed == "inference"
        return account
