"""Client connections below HTTP: how many, how large a request's head, how long it may take, who does not read.

Builds on uvicorn's httptools protocol, which has no such limits. Knows nothing of routes or the engine.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any, Literal

from starlette.types import Message, Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.heads import fault_of, without_upgrade
from server.metrics import Metrics
from server.middleware import GIVES_WAY, SHORTCUT, Exchange
from server.places import Place, Places
from server.protocol.errors import RATE_LIMITED, ApiError
from server.transports import ChunkWriter, hung_up, unsent_by_kernel

MAX_LINE = 64  # requests of one connection that wait for the one before them: each takes a hundred times its bytes
GOODBYE_S = 0.5  # at the end, a client has this long to answer the end of TLS


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Sizes are bytes, times are seconds."""

    max_connections: int
    max_head: int
    head_timeout_s: float
    max_unread: int  # of a stream
    max_stall_s: float


class ServerConfig(Config):
    """uvicorn's configuration, plus what `Connection` needs."""

    def __init__(self, app: Any, limits: ConnectionLimits, metrics: Metrics, **options: Any) -> None:
        super().__init__(app, http=Connection, **options)
        self.limits = limits
        self.metrics = metrics
        self.places: Places[Connection] = Places()


class Connection(HttpToolsProtocol):
    """One client connection.

    - More than `max_connections`: the one that gives way first (`Place`) is closed, or, if none does, the new one.
    - A request head that is too large or does not arrive in time: 431 or 408 and closed. One that may be read in two
      ways: 400 and closed.
    - More than MAX_LINE requests behind each other: 429 and closed, after the answers to those before.
    - What is no HTTP: 400 and closed, after the answers to all whole requests before it.
    - A client that lets `max_unread` bytes of a stream pile up, or takes nothing for `max_stall_s` while something
      waits for it: cut off and counted. For the route it has then left, so its request is aborted.
    - A client that does not answer the end of TLS: cut off within two seconds.
    - A client that ends its sending side has left: until something is written, nothing tells it from one that is gone.
    """

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._application = self.app
        self._limits = config.limits
        self._metrics = config.metrics
        self._places = config.places
        self._answering: RequestResponseCycle | None = None  # `cycle` is the newest request, which may wait in line
        self._reading: Literal["nothing", "head", "body"] = "nothing"
        self._bare_bytes = 0  # received since there last was a whole head or a piece of a body
        self._head_timer: asyncio.TimerHandle | None = None
        self._fault: ApiError | None = None  # of what is being parsed
        self._refusal: ApiError | None = None  # nothing more is read
        self._watched: Exchange | None = None  # the answer that the next two are about
        self._taken = 0  # bytes the client had taken at the last check that saw progress
        self._stalled_since: float | None = None
        self._has_said_goodbye = False  # at the last check it was closed, and nothing left to send

    # -- from bytes to requests ---------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._limits.max_unread)
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            transport.abort()
            return
        self._places.put(self, Place.IDLE)
        self._watch_head()

    def _make_room(self) -> bool:
        self._metrics.connection_closed_for_room()
        first = self._places.first()
        if first is None:
            return False
        self._places.put(first, None)
        first.transport.abort()
        return True

    def _gives_way(self) -> None:
        """The answer is one that its client can ask for again."""
        if self in self.connections:
            self._places.put(self, Place.WATCHING)

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        self._places.put(self, None)
        for cycle in (self._answering, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        if self._reading == "nothing" and not data.strip(b"\r\n"):
            return  # empty lines between requests mean nothing (RFC 9112, 2.2)
        if self._reading != "body":
            data = without_upgrade(data)
        self._bare_bytes += len(data)
        super().data_received(data)
        if self._reading != "nothing" and self._bare_bytes > self._limits.max_head:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        self._reading = "head"
        self._watch_head()
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == "head":  # trailers come after the checks
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_head:
            self._fault = self._too_large()
            raise ValueError("the request head is too large")  # httptools reports it as a parser error
        if len(self.pipeline) >= MAX_LINE:
            told = f"At most {MAX_LINE} requests of one connection may wait for the one before them."
            self._fault = ApiError(429, told, code=RATE_LIMITED)
            raise ValueError("too many requests in line")
        self._fault = fault_of(self.headers, self.parser.get_http_version())
        if self._fault is not None:
            raise ValueError("the request head may be read in two ways")
        self.app = self._until_close if self.parser.get_http_version() in ("0.9", "1.0") else self._application
        idle = not self._is_answering
        super().on_headers_complete()
        self.scope["state"] |= {SHORTCUT: ChunkWriter(self.cycle), GIVES_WAY: self._gives_way}
        if idle:
            self._answering = self.cycle
            self._places.put(self, Place.SENDING)
        self._unwatch_head()
        self._reading = "body"
        self._bare_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._bare_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading = "nothing"
        self._bare_bytes = 0
        super().on_message_complete()
        if self._is_answering and self.cycle is self._answering:
            self._places.put(self, Place.BUSY)

    def on_response_complete(self) -> None:
        answered, last = self._answering, not self.pipeline
        if not last:
            self._answering = following = self.pipeline[-1][0]
            self._places.put(self, Place.SENDING if following.more_body else Place.BUSY)
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if answered is not None and answered.more_body:  # answered unread, and the body does not end
            self.transport.close()
        elif last and self._refusal is not None:
            self._tell(self._refusal)
        elif last:
            self._places.put(self, Place.IDLE)

    @property
    def _is_answering(self) -> bool:
        return self._answering is not None and not self._answering.response_complete

    async def _until_close(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HTTP/1.0 knows no chunks: a body whose length is not told ends with the connection."""
        cycle = self._answering
        assert cycle is not None

        until_close = False

        async def send_plain(message: Message) -> None:
            nonlocal until_close
            if message["type"] == "http.response.start":
                until_close = not any(name.lower() == b"content-length" for name, _ in message["headers"])
                cycle.chunked_encoding = False if until_close else None  # None: uvicorn decides
            elif until_close:
                cycle.expected_content_length = len(message.get("body", b""))  # what uvicorn checks the body against
            await send(message)

        await self._application(scope, receive, send_plain)

    # -- refusing -----------------------------------------------------------------------------------------------

    def send_400_response(self, msg: str) -> None:
        """Whatever cannot be parsed as HTTP."""
        self._refuse(self._fault or ApiError(400, "The request is not valid HTTP.", code="invalid_http"))

    def _refuse(self, error: ApiError) -> None:
        """Read no further. Where a body is at fault, the layer that waits for it answers `error`; else the error is
        written when the requests before it have been answered."""
        self._unwatch_head()
        if self._refusal is not None or self.transport.is_closing():
            return
        self._refusal = error
        if self._reading == "body":
            self.cycle.scope["state"]["body_error"] = error
            self.cycle.more_body = self.cycle.keep_alive = False
            self.cycle.message_event.set()
        elif not self._is_answering:
            self._tell(error)

    def _tell(self, error: ApiError) -> None:
        body = error.envelope()
        head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self._metrics.error(error.status, let_in=False)
        self.transport.close()

    def _too_large(self) -> ApiError:
        message = f"The request's headers are larger than {self._limits.max_head} bytes."
        return ApiError(431, message, code="headers_too_large")

    def _watch_head(self) -> None:
        self._unwatch_head()
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_late)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        if self._is_answering:  # who reads an answer may send the next request later
            self._watch_head()
        elif self._reading == "head":
            self._refuse(ApiError(408, "The request's headers did not arrive in time.", code="request_timeout"))
        else:
            self.transport.close()

    # -- clients that do not read -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """More than `max_unread` waits for the client. A stream that piles up is cut off; a plain answer may be that
        large, and so may a single event or a stream that is told anew: their writers wait."""
        super().pause_writing()
        exchange = self._exchange()
        if exchange is not None and exchange.piles_up:
            self._cut_off()

    def check_stall(self, now: float) -> None:
        """Called every second or so; now: time.monotonic(). Progress is what left our buffer and the kernel's: the
        kernel asks for more only when a third of its buffer is free, which a slow reader may take minutes for."""
        if self.flow.read_paused and self._is_answering and hung_up(self.transport):
            self.transport.abort()  # with requests in line nothing is read, not even the end
            return
        exchange, unread = self._exchange(), self._unread()
        if self.transport.is_closing() and not unread and self._has_said_goodbye:
            self.transport.abort()  # TLS waits for the other side's word
            return
        self._has_said_goodbye = self.transport.is_closing() and not unread
        taken = (0 if exchange is None else exchange.bytes_sent) - unread
        if not unread:
            self._stalled_since = None
        elif self._stalled_since is None or exchange is not self._watched or taken > self._taken:
            self._stalled_since, self._watched, self._taken = now, exchange, taken
        elif now - self._stalled_since >= self._limits.max_stall_s:
            self._cut_off()

    def _unread(self) -> int:
        """Bytes on their way to the client. Under TLS a third buffer, unseen, stands between the two."""
        return self.transport.get_write_buffer_size() + unsent_by_kernel(self.transport)

    def _exchange(self) -> Exchange | None:
        state = self._answering.scope.get("state", {}) if self._answering is not None else {}
        return state.get("exchange")

    def shutdown(self) -> None:
        """The server ends: whoever has nothing being answered goes."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(GOODBYE_S, self._go)

    def _go(self) -> None:
        if self in self.connections and not self._unread():
            self.transport.abort()

    def _cut_off(self) -> None:
        self._metrics.slow_client()
        self.transport.abort()


def check_stalls(state: ServerState) -> None:
    """Look at every connection for a client that stopped reading."""
    now = time.monotonic()
    for connection in list(state.connections):
        if isinstance(connection, Connection):
            connection.check_stall(now)
