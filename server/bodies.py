"""Request bodies: read whole before a route runs, bounded each and all together. Pure ASGI, as `middleware.py`."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.body_log import tell
from server.middleware import CLOSE, Incoming, answer, header
from server.protocol.errors import RATE_LIMITED, ApiError

SMALL_BODY = 64 << 10  # bytes: so much there is always room for
NUM_LARGE = 16  # bodies of the largest size that may be in memory at a time


class Room:
    """Memory for the bodies of all requests together, but for the first SMALL_BODY bytes of each. One client may have
    half of it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._held: dict[str, int] = {}  # client -> bytes

    def take(self, client: str, num_bytes: int) -> bool:
        """Whether there is so much more."""
        own = self._held.get(client, 0) + num_bytes
        if self._num_bytes + num_bytes > self._max_bytes or own > self._max_bytes // 2:
            return False
        self._num_bytes += num_bytes
        self._held[client] = own
        return True

    def give_back(self, client: str, num_bytes: int) -> None:
        self._num_bytes -= num_bytes
        self._held[client] = self._held.get(client, 0) - num_bytes
        if not self._held[client]:
            del self._held[client]


class Body:
    """One that is being read; `close` gives its room back."""

    def __init__(self, room: Room, client: str) -> None:
        self._content = bytearray()
        self._room = room
        self._client = client
        self._taken = 0

    def __len__(self) -> int:
        return len(self._content)

    def add(self, piece: bytes) -> None:
        """Raises ApiError 429."""
        self._content += piece
        more = len(self._content) - SMALL_BODY - self._taken
        if more <= 0:
            return
        if not self._room.take(self._client, more):
            told = "The requests that are being read and answered take all the memory there is for them."
            raise ApiError(429, told, code=RATE_LIMITED, headers={"Retry-After": "1", **CLOSE})
        self._taken += more

    def whole(self) -> bytes:
        """All of it, once: it is not kept twice."""
        content, self._content = bytes(self._content), bytearray()
        return content

    def close(self) -> None:
        self._room.give_back(self._client, self._taken)
        self._taken = 0


class BodyLimit:
    """Reads the body before the route runs, at most `max_bytes` of it within `timeout_s`, and hands it over in one
    piece; after it `receive` waits for the client to leave. A body takes its room until the answer has ended."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, num_logged: int = 0) -> None:
        """num_logged: characters of a body that its log line has; 0: there is none."""
        self.app = app
        self._num_logged = num_logged
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._room = Room(NUM_LARGE * max_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (incoming := Incoming(scope, receive)).ended:
            await self.app(scope, receive, send)
            return
        account = scope.get("state", {}).get("account")
        body = Body(self._room, account.client.name if account is not None else "")
        try:
            outcome = await self._in_time(scope, incoming, body)
            if isinstance(outcome, ApiError):
                body.close()  # before the rest is waited for
                await answer(outcome, scope, incoming, send)
            elif outcome:
                content = body.whole()
                if self._num_logged:
                    tell(scope, content, self._num_logged)
                receive = _replay(content, receive)
                del content  # it is not kept twice
                await self.app(scope, receive, send)
        finally:
            body.close()

    async def _in_time(self, scope: Scope, incoming: Incoming, body: Body) -> bool | ApiError:
        """As `_read`, or why it is refused."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._read(scope, incoming, body)
        except TimeoutError:
            return ApiError(408, "The request body did not arrive in time.", code="request_timeout", headers=CLOSE)
        except ApiError as error:
            return error

    async def _read(self, scope: Scope, receive: Receive, body: Body) -> bool:
        """Whether all of it came; not if the client left. Raises ApiError: 413, 429, or what `Connection` found wrong
        with it."""
        told = f"The request body is larger than {self._max_bytes} bytes."
        too_large = ApiError(413, told, code="request_too_large", headers=CLOSE)
        length = header(scope, b"content-length") or b"0"
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            raise too_large
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return False
            if error := scope.get("state", {}).get("body_error"):
                raise error
            body.add(message.get("body", b""))
            if len(body) > self._max_bytes:
                raise too_large
            if not message.get("more_body", False):
                return True


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then whatever comes."""
    waiting = [body]

    async def replay() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return replay
