"""What a request's key and body make of the terms on which the engine serves it."""

from __future__ import annotations

import time
from typing import Protocol

from starlette.requests import Request

from engine.terms import Terms
from server.keys import Account
from server.settings import Settings


class Asked(Protocol):
    """A body, as far as terms go."""

    @property
    def timeout(self) -> float | None: ...

    @property
    def priority(self) -> int | None: ...

    @property
    def cache_salt(self) -> str | None: ...


def account_of(request: Request) -> Account | None:
    """None where no key was asked for."""
    account: Account | None = request.scope.get("state", {}).get("account")
    return account


def terms_of(request: Request, body: Asked, settings: Settings) -> Terms:
    """A request may shorten the server's time limit, not lengthen it."""
    arrival: float = request.scope.get("state", {}).get("arrival", time.monotonic())
    limits = [seconds for seconds in (body.timeout, settings.request_timeout) if seconds]
    deadline_s = arrival + min(limits) if limits else None
    account, priority = account_of(request), body.priority or 0
    if account is None:
        return Terms(priority=priority, deadline_s=deadline_s)
    client = account.client
    return Terms(client.name, client.weight, account.reserved, priority, deadline_s)


def salt_of(request: Request, body: Asked) -> str:
    """What must be equal for two requests to share a prefix: the salt that the body names, and whose key it is, else
    the time of an answer would tell a client what others have asked."""
    salt, account = body.cache_salt or "", account_of(request)
    if account is None:
        return salt
    group = account.client.cache_group
    return f"{len(group)}:{group}:{salt}"
