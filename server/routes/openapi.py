"""GET /openapi.json: what this server offers, for people and for tools."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Request, Response

from server.openapi import document

router = APIRouter()


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The same for every caller, so it is made once."""
    state = request.app.state
    made: bytes | None = getattr(state, "openapi", None)
    if made is None:
        made = state.openapi = await asyncio.to_thread(lambda: orjson.dumps(document(request.app)))
    return Response(made, media_type="application/json")
