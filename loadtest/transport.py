"""HTTP/1.1 on bare asyncio streams: as little work per token as Python allows.

The clock is read once per arrival of bytes, in the protocol's callback, before anything else happens. Connections are
kept and reused. `HttpxTransport` (transport_httpx.py) does the same through httpx; a test compares the two.
"""

from __future__ import annotations

import asyncio
import ssl
from time import perf_counter
from typing import Protocol, cast
from urllib.parse import urlsplit

from loadtest.lengths import UsageError
from loadtest.record import EventSplitter, RequestRecord


class TransportError(Exception):
    """The connection failed. The message is the kind of error that is counted: "connect", "connection lost"."""


class Transport(Protocol):
    async def post(self, path: str, body: bytes, record: RequestRecord) -> None:
        """Sends; fills status, sent_s, finished_s and events or body. Cancelling it closes the connection.
        Raises TransportError."""

    async def get(self, path: str) -> tuple[int, bytes]: ...

    async def close(self) -> None: ...


class HttpError(Exception):
    """The peer does not speak HTTP/1.1."""


class ResponseParser:
    """Bytes -> status, headers, pieces of body. One response; `complete` once its end was seen."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.complete = False
        self._buffer = b""
        self._in_body = False
        self._remaining: int | None = None  # bytes of the current chunk or of the body; None: until the peer closes
        self._chunked = False

    def feed(self, data: bytes) -> list[bytes]:
        self._buffer += data
        if not self._in_body and not self._head():
            return []
        pieces: list[bytes] = []
        while not self.complete and (self._chunk(pieces) if self._chunked else self._plain(pieces)):
            pass
        return pieces

    def _head(self) -> bool:
        head, separator, rest = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return False
        first, *lines = head.split(b"\r\n")
        version, _, status = first.partition(b" ")
        if not version.startswith(b"HTTP/1."):
            raise HttpError(first[:40])
        self.status = int(status[:3])
        self._buffer = rest
        if self.status == 100:
            return self._head()
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers[name.strip().lower()] = value.strip()
        self._in_body = True
        self._chunked = self.headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        if not self._chunked and b"content-length" in self.headers:
            self._remaining = int(self.headers[b"content-length"])
            self.complete = self._remaining == 0
        return True

    def _plain(self, pieces: list[bytes]) -> bool:
        piece, self._buffer = self._buffer, b""
        if piece:
            pieces.append(piece)
        if self._remaining is not None:
            self._remaining -= len(piece)
            self.complete = self._remaining <= 0
        return False

    def _chunk(self, pieces: list[bytes]) -> bool:
        """One chunk, if all of it is there. Returns whether to go on."""
        size_line, separator, rest = self._buffer.partition(b"\r\n")
        if not separator:
            return False
        size = int(size_line.partition(b";")[0], 16)
        if len(rest) < size + 2:
            return False
        if size:
            pieces.append(rest[:size])
        else:
            self.complete = True
        self._buffer = rest[size + 2 :]
        return True


class _Connection(asyncio.Protocol):
    """One connection, one exchange at a time. `idle` while it can take the next."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.closed = False
        self.finished: asyncio.Future[None] | None = None
        self.num_bytes = 0
        self._parser = ResponseParser()
        self._record: RequestRecord | None = None
        self._events: EventSplitter | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # other event loops have classes of their own

    def begin(self, head: bytes, body: bytes, record: RequestRecord) -> asyncio.Future[None]:
        assert self.transport is not None
        self._parser, self._events, self._record, self.num_bytes = ResponseParser(), None, record, 0
        self.finished = asyncio.get_running_loop().create_future()
        self.transport.write(head + body)
        return self.finished

    def data_received(self, data: bytes) -> None:
        now = perf_counter()
        self.num_bytes += len(data)
        record = self._record
        if record is None or self.finished is None or self.finished.done():
            return
        try:
            pieces = self._parser.feed(data)
        except (HttpError, ValueError):
            self._fail("not HTTP")
            return
        if record.status != self._parser.status:
            record.status = self._parser.status
            if self._parser.headers.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._events = EventSplitter()
        for piece in pieces:
            if self._events is None:
                record.body += piece
            else:
                record.events += [(now, payload) for payload in self._events.feed(piece)]
        if self._parser.complete:
            self._end(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self.finished is not None and not self.finished.done():
            headers = self._parser.headers
            whole = headers and b"content-length" not in headers and b"transfer-encoding" not in headers
            if whole and exc is None:
                self._end(perf_counter())
            else:
                self._fail("connection lost")

    def abort(self) -> None:
        self.closed = True
        if self.transport is not None:
            self.transport.abort()

    def _end(self, now: float) -> None:
        assert self._record is not None
        assert self.finished is not None
        self._record.finished_s = now
        if self._parser.headers.get(b"connection", b"").lower() == b"close":
            self.abort()
        self.finished.set_result(None)

    def _fail(self, kind: str) -> None:
        self.abort()
        if self.finished is not None and not self.finished.done():
            self.finished.set_exception(TransportError(kind))


class RawTransport:
    """A pool of connections to one server. url: http://host:port (https works too); a path in it is kept."""

    def __init__(self, url: str, *, api_key: str = "", connect_timeout_s: float = 30.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"The address must look like http://127.0.0.1:8000, got {url!r}.")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\n{key}Accept: text/event-stream, application/json\r\n"
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []

    async def post(self, path: str, body: bytes, record: RequestRecord) -> None:
        lengths = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._headers}{lengths}\r\n".encode()
        await self._exchange(head, body, record)

    async def get(self, path: str) -> tuple[int, bytes]:
        """Any body is returned whole. Raises TransportError."""
        record = RequestRecord(0, streamed=False)
        await self._exchange(f"GET {self._prefix}{path} HTTP/1.1\r\n{self._headers}\r\n".encode(), b"", record)
        return record.status, bytes(record.body)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    async def _exchange(self, head: bytes, body: bytes, record: RequestRecord) -> None:
        record.sent_s = perf_counter()
        while True:
            connection, reused = await self._connection()
            try:
                await connection.begin(head, body, record)
            except TransportError:
                if reused and connection.num_bytes == 0:  # the server closed an idle connection as we wrote: again
                    continue
                raise
            except BaseException:
                connection.abort()
                raise
            if not connection.closed:
                self._idle.append(connection)
            return

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, True
        loop = asyncio.get_running_loop()
        context = ssl.create_default_context() if self._tls else None
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=context)
        except (OSError, TimeoutError):
            raise TransportError("connect") from None
        return connection, False
