"""/admin/...: what an operator does to a running server. Only with a key of the scope admin, in every phase."""

from __future__ import annotations

import logging
from typing import Any, get_args

import orjson
from fastapi import APIRouter, Request, Response

from engine.config import StartError
from server.engine_port import Engine
from server.keys import Account
from server.logs import LogLevel, level_of, set_level
from server.protocol.errors import ApiError, InvalidRequest
from server.reload import Reloader

logger = logging.getLogger("pagemill.server")

router = APIRouter(prefix="/admin", include_in_schema=False)

ADMIN_PATHS = ("/admin/drain", "/admin/reload", "/admin/log_level")  # of use in every phase of the engine
LEVELS: tuple[LogLevel, ...] = get_args(LogLevel)


@router.post("/drain")
async def drain(request: Request) -> Response:
    """As SIGTERM: new work is refused, what is in flight finishes within the grace period, then the server ends."""
    _audit(request, "drain")
    request.app.state.end()
    return _json({"status": "draining"}, 202)


@router.post("/reload")
async def reload(request: Request) -> Response:
    """Reads key file and certificate again, as SIGHUP does. 409 if one of them cannot be used: the old ones stay."""
    _audit(request, "reload")
    reloader: Reloader = request.app.state.reloader
    try:
        reloaded = reloader.reload()
    except StartError as error:
        raise ApiError(409, str(error), code="not_reloaded") from error
    return _json({"status": "reloaded", **reloaded.facts()})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Requests from now on find nothing of what was computed before."""
    _audit(request, "reset_prefix_cache")
    engine: Engine = request.app.state.engine
    engine.reset_prefix_cache()
    return _json({"status": "reset"}, 202)


@router.get("/log_level")
async def get_log_level(request: Request) -> Response:
    """{"level"}"""
    _audit(request, "log_level")
    return _json({"level": level_of()})


@router.post("/log_level")
async def set_log_level(request: Request) -> Response:
    """Body: {"level": "debug" | "info" | "warning" | "error"}."""
    _audit(request, "set log_level")
    level = _level(await request.body())
    set_level(level)
    return _json({"level": level})


def _level(body: bytes) -> LogLevel:
    """Raises InvalidRequest."""
    try:
        given = orjson.loads(body)
    except orjson.JSONDecodeError:
        given = None
    level = given.get("level") if isinstance(given, dict) else None
    for known in LEVELS:
        if level == known:
            return known
    raise InvalidRequest(f"level must be one of {', '.join(LEVELS)}.", param="level")


def _audit(request: Request, action: str) -> None:
    """Say in the log who does it. The key was checked by the path; a second look here does not go by how the path was
    spelled. Raises ApiError 403."""
    account: Account | None = request.scope.get("state", {}).get("account")
    if account is None or "admin" not in account.client.scopes:
        raise ApiError(403, "This needs an API key of the scope admin.", code="missing_scope")
    logger.warning("admin", extra={"fields": {"action": action, "client": account.client.name}})


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
