"""Connections below HTTP, with raw sockets: heads that are too large or too late, clients that do not read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from starlette.types import Receive, Scope, Send

from server.connections import ConnectionLimits, ServerConfig, check_stalls
from server.lifecycle import Server
from server.metrics import Metrics
from server.middleware import RequestContext

LIMITS = ConnectionLimits(max_connections=100, max_head=4096, head_timeout_s=30, max_unread=65536, max_stall_s=30)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"


class App:
    """Answers "ok"; /stream sends `chunk` until the client is gone, /large one plain answer of 4 MiB."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.chunk = b"x" * 8192

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streaming = scope["path"] == "/stream"
        kind = b"text/event-stream" if streaming else b"text/plain"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        if not streaming:
            body = b"y" * (4 << 20) if scope["path"] == "/large" else b"ok"
            await send({"type": "http.response.body", "body": body})
            return
        left = asyncio.create_task(self._left(receive))
        while not left.done():
            await send({"type": "http.response.body", "body": self.chunk, "more_body": True})
            await asyncio.sleep(0)

    async def _left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


class Running:
    def __init__(self, limits: ConnectionLimits) -> None:
        self.app, self.metrics = App(), Metrics()
        context = RequestContext(self.app, self.metrics)
        config = ServerConfig(context, limits, self.metrics, lifespan="off", ws="none", log_config=None)
        self.server = Server(config)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]

    async def connect(self, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        client = socket.socket()
        if receive_buffer:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        return await asyncio.open_connection(sock=client, limit=1024)

    async def exchange(self, request: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(request)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    def slow_clients(self) -> bool:
        return b"pagemill_slow_clients_total 1.0" in self.metrics.render()


@pytest.fixture
async def start() -> AsyncIterator[object]:
    started: list[tuple[Running, asyncio.Task[None]]] = []

    async def starter(**changes: float) -> Running:
        running = Running(replace(LIMITS, **changes))
        task = asyncio.create_task(running.server.serve(sockets=[running.listener]))
        started.append((running, task))
        running.listener.listen()  # connections wait in the backlog until the server runs
        return running

    yield starter
    for running, task in started:
        running.server.should_exit = True
        for connection in list(running.server.server_state.connections):
            connection.transport.abort()
        await task


def error_of(answer: bytes) -> tuple[int, dict[str, str]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_a_sane_request_passes(start) -> None:  # type: ignore[no-untyped-def]
    running = await start()
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).endswith(b"2\r\nok\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET + b"X-Fill: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        GET + b"".join(b"X-%d: a\r\n" % i for i in range(2000)) + b"\r\n",
    ],
    ids=["one header", "address", "many headers"],
)
async def test_a_large_head_is_refused(start, request_bytes: bytes) -> None:  # type: ignore[no-untyped-def]
    running = await start()
    status, error = error_of(await running.exchange(request_bytes))
    assert status == 431
    assert set(error) == {"message", "type", "param", "code"}
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def _flood(writer: asyncio.StreamWriter) -> None:
    for _ in range(1000):
        writer.write(b"a" * 65536)
        await asyncio.wait_for(writer.drain(), 5)


async def test_an_endless_head_is_not_read_to_its_end(start) -> None:  # type: ignore[no-untyped-def]
    running = await start()
    _, writer = await running.connect()
    writer.write(GET + b"X-Fill: ")
    flood = asyncio.create_task(_flood(writer))
    with pytest.raises(ConnectionError):
        await flood
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_body_does_not_count_as_head(start) -> None:  # type: ignore[no-untyped-def]
    running = await start()
    body = b"b" * 100_000
    request = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await running.exchange(request + body)).startswith(b"HTTP/1.1 200")


async def test_what_is_not_http_gets_an_error_in_shape(start) -> None:  # type: ignore[no-untyped-def]
    running = await start()
    status, error = error_of(await running.exchange(b"\x16\x03\x01 not http\r\n\r\n"))
    assert (status, error["code"]) == (400, "invalid_http")


async def test_a_head_that_does_not_come_ends_the_connection(start) -> None:  # type: ignore[no-untyped-def]
    running = await start(head_timeout_s=0.2)
    assert await running.exchange(b"") == b""
    status, _ = error_of(await running.exchange(GET))
    assert status == 408


async def test_the_time_for_a_head_starts_anew_on_a_kept_connection(start) -> None:  # type: ignore[no-untyped-def]
    running = await start(head_timeout_s=0.3)
    reader, writer = await running.connect()
    writer.write(GET + b"\r\n")
    assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await asyncio.sleep(0.5)  # idle between requests is keep-alive's business
    writer.write(GET)
    assert error_of(await asyncio.wait_for(reader.read(), 5))[0] == 408
    writer.close()


async def test_connections_above_the_limit_are_closed(start) -> None:  # type: ignore[no-untyped-def]
    running = await start(max_connections=3)
    kept = [await running.connect() for _ in range(3)]
    reader, writer = await running.connect()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    for _, held in kept:
        held.close()
    await asyncio.sleep(0.1)
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_stream_that_is_not_read_is_cut_off_and_counted(start) -> None:  # type: ignore[no-untyped-def]
    running = await start()
    _, writer = await running.connect(receive_buffer=4096)
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.wait_for(running.app.gone.wait(), 10)
    assert running.slow_clients()
    writer.close()


async def test_a_stream_that_is_read_goes_on(start) -> None:  # type: ignore[no-untyped-def]
    running = await start()
    reader, writer = await running.connect()
    running.app.chunk = b"x" * 100
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    for _ in range(200):
        await asyncio.wait_for(reader.readexactly(1000), 5)
    assert not running.app.gone.is_set()
    assert not running.slow_clients()
    writer.close()


async def test_a_large_plain_answer_waits_for_its_reader_but_not_for_ever(start) -> None:  # type: ignore[no-untyped-def]
    running = await start(max_stall_s=0.3)
    reader, writer = await running.connect(receive_buffer=4096)
    writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\n\r\n")
    for _ in range(10):  # reads slowly: never cut off
        await asyncio.sleep(0.1)
        await reader.readexactly(50_000)
        check_stalls(running.server.server_state)
    assert not running.slow_clients()
    for _ in range(8):  # reads nothing
        await asyncio.sleep(0.1)
        check_stalls(running.server.server_state)
    assert running.slow_clients()
    writer.close()
