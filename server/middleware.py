"""What every request passes before it reaches a route: an id and a log line, the engine's phase, the body.

Pure ASGI: Starlette's BaseHTTPMiddleware would hide client disconnects. From the outside in:

RequestContext   id (told in X-Request-Id), what was ignored, arrival time, one log line, counts; contains what escapes
(CORS)           Starlette's own, only with --cors-origins
(auth.py)        who may ask: pages of other origins may not, and where there are keys every path needs one
PhaseGate        503 while the model loads, while the server drains, and when the engine is dead
(bodies.py)      reads the whole body first: 413 above the limit, 408 when it does not arrive in time
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any, Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.outputs import Phase
from server.ignored import HEADER, Names
from server.logs import REQUEST_LOGGER, Seldom, clean
from server.metrics import Metrics
from server.protocol.errors import CLIENT_CLOSED, ApiError, to_api_error
from server.protocol.message_errors import speaks_messages
from server.tracing import Tracing

logger = logging.getLogger(REQUEST_LOGGER)

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,64}")
NOT_READY = {
    Phase.STARTING: "The model is still loading. Please try again shortly.",
    Phase.DRAINING: "The server is shutting down.",
    Phase.DEAD: "The engine has stopped working; the server is going down.",
}
CLOSE = {"Connection": "close"}
# of every answer that does not say otherwise: to be taken for what it says it is, by our own pages alone
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
)
SHORTCUT = "shortcut"
GIVES_WAY = "gives_way"  # in scope["state"], where the server has it: see `give_way`
STRANGERS_PER_SECOND = 10  # lines about requests that need no key, or have none
LINGER_S = 2.0  # how long the body of a refused request is taken
LARGE_PIECE = 64 << 10  # bytes: of a body, whose writer waits until the client has most of it


class Shortcut(Protocol):
    """How a server lets a piece of an answer's body past ASGI, whose coroutines and messages cost several times what
    the write does: `scope["state"][SHORTCUT]`."""

    @property
    def is_open(self) -> bool:
        """Whether a piece can leave now: the head has, and nobody has to wait."""

    def write(self, body: bytes) -> None: ...


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    return next((value for key, value in scope["headers"] if key == name), None)


def give_way(scope: Scope) -> None:
    """The client could ask for this answer again: where connections are short, its own is one that may be closed."""
    if (gives_way := scope.get("state", {}).get(GIVES_WAY)) is not None:
        gives_way()


class Incoming:
    """`receive`, which remembers whether the body has ended."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        length = header(scope, b"content-length")
        self.ended = header(scope, b"transfer-encoding") is None and length in (None, b"0")

    async def __call__(self) -> Message:
        message = await self._receive()
        self.ended = not (message["type"] == "http.request" and message.get("more_body", False))
        return message


async def answer(error: ApiError, scope: Scope, incoming: Incoming, send: Send) -> None:
    """Refuse a request whose body may still be on its way: closing at once would destroy the answer before a client
    that is busy sending reads it, so the rest is taken, but not for long (`server/connections.py` closes then)."""
    response = error.response(scope)
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while not incoming.ended:
                await incoming()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestContext:
    """Gives each request `state.request_id`, `state.arrival` (time.monotonic) and `state.log`, a dictionary that
    routes fill with facts (never with text) for the one line that is logged when the answer ends. And `state.trace`,
    where requests are traced and this one is."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracing: Tracing | None = None) -> None:
        self.app = app
        self.metrics = metrics
        self._tracing = tracing
        self._strangers = Seldom(STRANGERS_PER_SECOND)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = (header(scope, b"x-request-id") or b"").decode("latin-1")
        is_given = REQUEST_ID.fullmatch(given) is not None
        request_id = given if is_given else uuid.uuid4().hex
        facts: dict[str, object] = {}
        arrival = time.monotonic()
        state: dict[str, Any] = scope.setdefault("state", {})
        ignored = Names()
        state |= {"request_id": request_id, "id_given": is_given, "arrival": arrival, "log": facts, "ignored": ignored}
        exchange = Exchange(
            send,
            request_id.encode(),
            ignored,
            also_as_request_id=speaks_messages(scope),
            shortcut=state.get(SHORTCUT),
        )
        state["exchange"] = exchange
        if self._tracing is not None and (trace := self._tracing.begin(scope, arrival)) is not None:
            state["trace"] = trace
            facts["trace"] = trace.id
        self.metrics.http_started()
        try:
            await self.app(scope, receive, exchange.send)
        except Exception as error:
            logger.exception("a request failed", extra={"fields": {"id": request_id}})
            exchange.failed = True
            if exchange.status:
                if not exchange.complete:
                    raise  # half an answer is out: uvicorn closes the connection
            else:  # let go further it would cost the connection, and with it the client's next request
                await to_api_error(error).response(scope)(scope, receive, exchange.send)
        finally:
            self.metrics.http_ended()
            self._report(scope, exchange, time.monotonic() - arrival, facts)

    def _report(self, scope: Scope, exchange: Exchange, seconds: float, facts: dict[str, object]) -> None:
        status = exchange.status or (500 if exchange.failed else CLIENT_CLOSED)
        state = scope["state"]
        if let_in := state.get("let_in", False):
            self.metrics.let_in()
        probe = scope["path"] in ("/health", "/metrics")  # asked every few seconds by machines
        is_told = logger.isEnabledFor(logging.DEBUG) or not probe
        if is_told and not let_in and "account" not in state:
            is_told = self._strangers.allows(time.monotonic())  # they shall not fill the disk, or drown the traces
        if is_told and (trace := state.get("trace")) is not None:
            trace.finish(scope, status, is_complete=exchange.complete)
        if status >= 400 and not (probe and status == 503):  # "not yet" is what a probe asks for
            route = getattr(scope.get("route"), "path", "")
            self.metrics.error(status, route, exchange.request_id.decode(), let_in=let_in)
        if not is_told:
            return
        line = {
            "id": exchange.request_id.decode(),
            "method": scope["method"],
            "path": clean(scope["path"], 80),
            "status": status,
            "ms": round(seconds * 1000, 1),
            **facts,
        }
        if status < 400 and not exchange.complete:
            line["cut"] = True  # the client left, or was cut off, before the end
        if untold := self._strangers.untold():
            line["untold"] = untold
        logger.log(logging.DEBUG if probe else logging.INFO, "request", extra={"fields": line})


class Exchange:
    """Watches one answer go out: status, bytes, and whether it is an event stream. Its head gets the request's id and
    the names of what was ignored. A route that gives its answer an id sets `request_id`, unless the client has.

    also_as_request_id: the id goes into the header request-id too, where Anthropic's clients look for it. shortcut:
    the server's, if it has one. replays: a stream of what is kept anyway; set by who writes it."""

    __slots__ = (
        "_id_headers", "_ignored", "_is_large", "_send", "_shortcut", "bytes_sent", "complete", "failed", "replays",
        "request_id", "status", "streaming",
    )  # fmt: skip

    def __init__(
        self,
        send: Send,
        request_id: bytes,
        ignored: Names,
        *,
        also_as_request_id: bool = False,
        shortcut: Shortcut | None = None,
    ) -> None:
        self._send = send
        self._shortcut = shortcut
        self._ignored = ignored
        self._id_headers = (b"x-request-id", b"request-id") if also_as_request_id else (b"x-request-id",)
        self.request_id = request_id
        self.status = 0  # 0: no answer yet
        self.streaming = False
        self.complete = False
        self.failed = False
        self.bytes_sent = 0
        self.replays = False
        self._is_large = False  # the last piece

    @property
    def piles_up(self) -> bool:
        """Whether what waits for the client are its stream's many pieces: it does not read. Else it had no time to:
        the last piece alone is large, or all of them were there at once."""
        return self.streaming and not self.replays and not self._is_large

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            num_bytes = len(message.get("body", b""))
            self.bytes_sent += num_bytes
            self._is_large = num_bytes >= LARGE_PIECE
            await self._send(message)
            self.complete = not message.get("more_body", False)
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [(key, value) for key, value in message.get("headers", ()) if key != b"x-request-id"]
            self.streaming = any(k == b"content-type" and v.startswith(b"text/event-stream") for k, v in headers)
            headers += [(name, self.request_id) for name in self._id_headers]
            told = {key for key, _ in headers}
            headers += [each for each in SECURITY_HEADERS if each[0] not in told]
            if self._ignored:
                headers.append((HEADER, self._ignored.header()))
            message = {**message, "headers": headers}
        await self._send(message)

    @property
    def can_write(self) -> bool:
        return self._shortcut is not None and self._shortcut.is_open

    def write(self, body: bytes) -> None:
        """A further piece of the body, not the last; only where `can_write`. The layers between change heads alone,
        so a piece may go past them."""
        assert self._shortcut is not None
        self.bytes_sent += len(body)
        self._is_large = len(body) >= LARGE_PIECE
        self._shortcut.write(body)


class PhaseGate:
    """503 for everything but `open_paths` unless the engine is ready. While draining, connections are closed so
    that clients find another server."""

    def __init__(self, app: ASGIApp, phase: Callable[[], Phase], open_paths: Collection[str]) -> None:
        self.app = app
        self._phase = phase
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        phase = self._phase()
        if scope["type"] == "http" and phase is not Phase.READY and scope["path"] not in self._open_paths:
            headers = {"Retry-After": "1"} if phase is Phase.STARTING else {"Retry-After": "1", "Connection": "close"}
            error = ApiError(503, NOT_READY[phase], code=f"server_{phase.value}", headers=headers)
            await answer(error, scope, Incoming(scope, receive), send)
            return
        await self.app(scope, receive, send)
