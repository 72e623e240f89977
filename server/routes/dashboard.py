"""The status page: GET / and its two files, which are the same for everybody, and the numbers it shows, as events.

The files hold nothing about this server, so they need no key; the events need one where there are keys.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.types import Receive, Scope, Send

from server.dashboard.feed import Feed
from server.middleware import give_way
from server.protocol.errors import ApiError
from server.sse import client_gone

router = APIRouter(include_in_schema=False)

PAGE_PATHS = ("/", "/dashboard/page.css", "/dashboard/page.js")
EVENTS_PATH = "/dashboard/events"

FOLDER = Path(__file__).parents[1] / "dashboard"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)


class EventFeed(Response):
    """What one viewer gets, until it leaves or the feed ends."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises ApiError 429 where too many watch."""
        self._feed.enter()
        give_way(scope)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            sending = asyncio.create_task(self._send_all(send))
            gone = asyncio.create_task(client_gone(receive))
            try:
                await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
                if sending.done():
                    sending.result()
            finally:
                sending.cancel()
                gone.cancel()
        finally:
            self._feed.leave()

    async def _send_all(self, send: Send) -> None:
        async for frame in self._feed.frames():
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@router.get("/")
async def page(request: Request) -> Response:
    """The status page; it asks for a key if the server does."""
    return _file("page.html", "text/html", asks=request.app.state.has_keys)


@router.get("/dashboard/page.css")
async def style() -> Response:
    """Its style."""
    return _file("page.css", "text/css")


@router.get("/dashboard/page.js")
async def script() -> Response:
    """Its script."""
    return _file("page.js", "text/javascript")


@router.get(EVENTS_PATH)
async def events(request: Request) -> Response:
    """A frame of numbers, twice a second, as server-sent events. Raises ApiError 403: a page of others could not read
    them, but its images could take all places."""
    if request.headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        raise ApiError(403, "Pages of other origins may not look at the status.", code="origin_not_allowed")
    return EventFeed(request.app.state.feed)


def _file(name: str, media_type: str, *, asks: bool = False) -> Response:
    """asks: tell the script that it needs a key, so that it need not be refused to learn it."""
    body = (FOLDER / name).read_bytes()
    if asks:
        body = body.replace(b"<html ", b"<html data-keys ", 1)
    headers = {"Content-Security-Policy": POLICY, "Cache-Control": "no-cache"}
    return Response(body, media_type=media_type, headers=headers)
