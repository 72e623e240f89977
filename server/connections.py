"""Client connections below HTTP: how many, how large a request's head, how long it may take, who does not read.

Builds on uvicorn's httptools protocol, which has no such limits. Knows nothing of routes or the engine.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios
import time
from dataclasses import dataclass
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from server.metrics import Metrics
from server.middleware import Exchange
from server.protocol.errors import ApiError


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


class Connection(HttpToolsProtocol):
    """One client connection.

    - More than `max_connections`: closed at once.
    - A request head that is too large or does not arrive in time: 431 or 408 and closed.
    - A client that lets `max_unread` bytes of a stream pile up, or takes nothing for `max_stall_s` while something
      waits for it: cut off and counted. For the route it has then left, so its request is aborted."""

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._metrics = config.metrics
        self._head_bytes = 0
        self._in_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: ApiError | None = None
        self._watched: Exchange | None = None  # the answer that the next two are about
        self._taken = 0  # bytes the client had taken at the last check that saw progress
        self._stalled_since: float | None = None

    # -- the head -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=self._limits.max_unread)
        if len(self.connections) > self._limits.max_connections:
            transport.abort()
            return
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch_head()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._head_timer is None:  # a further request on a connection that was kept alive
                self._watch_head()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self._limits.max_head and not self.transport.is_closing():
            self._refuse_head()
            self.send_400_response("")

    def on_headers_complete(self) -> None:
        self._unwatch_head()
        self._in_head = False
        self._head_bytes = 0
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self._limits.max_head:
            self._refuse_head()
            raise ValueError("the request head is too large")  # httptools reports it as a parser error
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Whatever cannot be parsed as HTTP: an error in OpenAI's shape, and the connection ends."""
        error = self._refusal or ApiError(400, "The request is not valid HTTP.", code="invalid_http")
        body = error.envelope()
        head = f"HTTP/1.1 {error.status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:  # else it would land inside another answer
                self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
                self._metrics.error(error.status)
            self.transport.close()

    def _refuse_head(self) -> None:
        message = f"The request's headers are larger than {self._limits.max_head} bytes."
        self._refusal = ApiError(431, message, code="headers_too_large")

    def _watch_head(self) -> None:
        self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_late)

    def _unwatch_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        self._head_timer = None
        if self._head_bytes:
            self._refusal = ApiError(408, "The request's headers did not arrive in time.", code="request_timeout")
            self.send_400_response("")
        else:
            self.transport.close()

    # -- clients that do not read -------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """More than `max_unread` waits for the client. A stream is cut off; a plain answer may be that large, its
        writer waits."""
        super().pause_writing()
        exchange = self._exchange()
        if exchange is not None and exchange.streaming:
            self._cut_off()

    def check_stall(self, now: float) -> None:
        """Called every second or so; now: time.monotonic(). Progress is what left our buffer and the kernel's: the
        kernel asks for more only when a third of its buffer is free, which a slow reader may take minutes for."""
        exchange = self._exchange()
        buffered = self.transport.get_write_buffer_size()
        if exchange is None or (exchange.complete and not buffered):
            self._stalled_since = None
            return
        unread = buffered + unsent_by_kernel(self.transport)
        taken = exchange.bytes_sent - unread
        if not unread:
            self._stalled_since = None
        elif self._stalled_since is None or exchange is not self._watched or taken > self._taken:
            self._stalled_since, self._watched, self._taken = now, exchange, taken
        elif now - self._stalled_since >= self._limits.max_stall_s:
            self._cut_off()

    def _exchange(self) -> Exchange | None:
        state = self.cycle.scope.get("state", {}) if self.cycle is not None else {}
        return state.get("exchange")

    def _cut_off(self) -> None:
        self._metrics.slow_client()
        self.transport.abort()


def unsent_by_kernel(transport: asyncio.Transport) -> int:
    """Bytes in the kernel's send buffer that the client has not acknowledged; 0 where the system cannot tell."""
    answer = array.array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, answer)
    except OSError:
        return 0
    return answer[0]


def check_stalls(state: ServerState) -> None:
    """Look at every connection for a client that stopped reading."""
    now = time.monotonic()
    for connection in list(state.connections):
        if isinstance(connection, Connection):
            connection.check_stall(now)
