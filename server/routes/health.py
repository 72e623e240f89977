"""/health, /metrics and /version: what operators ask. They answer in every phase of the engine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import orjson
from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from engine.outputs import NotServing, Phase
from server.engine_port import Engine

router = APIRouter()

OPERATOR_PATHS = ("/health", "/metrics", "/version")


@router.get("/health")
async def health(request: Request) -> Response:
    """200 when a request would be served; else 503 and why: starting (and with what), draining, dead or hung (a step
    that does not end)."""
    engine: Engine = request.app.state.engine
    status = engine.phase.value
    if engine.phase is Phase.READY and engine.hung:
        status = "hung"
    facts: dict[str, object] = {"status": status}
    if engine.phase is Phase.STARTING and (loading := engine.progress).phase:
        facts |= {"loading": loading.phase, "share": None if loading.share is None else round(loading.share, 2)}
    return _json(facts, 200 if status == Phase.READY.value else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(request.app.state.metrics.render(), media_type=CONTENT_TYPE_LATEST)


@router.get("/version")
async def version_facts(request: Request) -> Response:
    """Versions, and the numeric profile within which equal requests give equal tokens."""
    facts: dict[str, object] = {
        "version": package_version("pagemill"),
        "python": platform.python_version(),
        "torch": package_version("torch"),
        "transformers": package_version("transformers"),
    }
    try:
        info = request.app.state.engine.model_info
    except NotServing:
        return _json(facts)
    facts |= {
        "model": info.name,
        "system_fingerprint": info.system_fingerprint,
        "numeric_profile": info.numeric_profile,
        "batch_invariant": info.batch_invariant,
    }
    return _json(facts)


def package_version(name: str) -> str:
    """Read from the installed metadata: importing torch for its version would take seconds."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"


def _json(value: object, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status_code=status, media_type="application/json")
