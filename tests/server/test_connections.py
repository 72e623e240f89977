"""Connections below HTTP, with raw sockets: heads that are too large or too late, clients that do not read, bytes that
are no HTTP, requests that wait in line."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from starlette.types import Receive, Scope, Send

from server import middleware
from server.bodies import BodyLimit
from server.connections import MAX_LINE, ConnectionLimits, ServerConfig, check_stalls
from server.event_log import EventLog, LogStream
from server.lifecycle import Server
from server.metrics import Metrics
from server.middleware import Exchange, RequestContext
from server.transports import hung_up, unsent_by_kernel
from tests.server.harness import eventually

LIMITS = ConnectionLimits(max_connections=100, max_head=4096, head_timeout_s=30, max_unread=65536, max_stall_s=30)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n"
MUCH = (b"data: " + b"z" * 1016 + b"\n\n") * (8 << 10)


class App:
    """Answers "ok"; /slow after half a second, /echo what it got, /length with a length, /stream sends `chunk` every
    `pause_s` until the client is gone, /past the same past ASGI where it can, /large one plain answer of 4 MiB,
    /event a stream of one event of 8 MiB, /log the stream of a log of 8 MiB, /watch the stream of a log that does not
    end."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.chunk = b"x" * 8192
        self.pause_s = 0.0
        self.num_calls = 0
        self.num_past = 0  # pieces that went past ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_calls += 1
        path = scope["path"]
        streaming = path in ("/stream", "/past")
        exchange: Exchange = scope["state"]["exchange"]
        assert not exchange.can_write
        if path in ("/event", "/log", "/watch"):
            await self._much(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream" if streaming else b"text/plain")]
        if path == "/length":
            headers.append((b"Content-Length", b"2"))
        if path == "/slow":
            await asyncio.sleep(0.5)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if not streaming:
            body = {"/large": b"y" * (4 << 20)}.get(path, b"ok")
            if path == "/echo":
                body = (await receive())["body"]
            await send({"type": "http.response.body", "body": body[:1], "more_body": True})
            await send({"type": "http.response.body", "body": body[1:]})
            assert not exchange.can_write
            return
        left = asyncio.create_task(self._left(receive))
        while not left.done():
            if path == "/past" and exchange.can_write:
                exchange.write(self.chunk)
                self.num_past += 1
            else:
                await send({"type": "http.response.body", "body": self.chunk, "more_body": True})
            await asyncio.wait({left}, timeout=self.pause_s)
        assert not exchange.can_write

    async def _much(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] != "/event":
            log = EventLog()
            log.append(MUCH if scope["path"] == "/log" else b"data: 1\n\n")
            log.publish(ended=scope["path"] == "/log")
            await LogStream(log, 0, metrics=Metrics(), keep_alive_s=0)(scope, receive, send)
            return
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": MUCH, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _left(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone.set()


class Running:
    def __init__(self, limits: ConnectionLimits, **options: str) -> None:
        self.app, self.metrics = App(), Metrics()
        context = RequestContext(BodyLimit(self.app, 100_000, 30), self.metrics)
        config = ServerConfig(context, limits, self.metrics, lifespan="off", ws="none", log_config=None, **options)
        config.load()
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


@pytest.mark.parametrize("is_closed", [None, True, False])
def test_a_transport_is_asked_also_in_the_moment_after_its_end(is_closed: bool | None) -> None:
    class Ending(asyncio.Transport):
        def get_extra_info(self, name: str, default: object = None) -> socket.socket | None:
            return None if is_closed is None else ends[0]  # TLS has forgotten its socket by then

    ends = socket.socketpair()
    if is_closed:
        ends[0].close()
    assert unsent_by_kernel(Ending()) == 0
    assert hung_up(Ending()) is (is_closed is not False)
    for end in ends:
        end.close()


async def test_a_sane_request_passes(start) -> None:
    running = await start()
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).endswith(b"1\r\no\r\n1\r\nk\r\n0\r\n\r\n")


@pytest.mark.parametrize(
    "request_bytes",
    [
        GET + b"X-Fill: " + b"a" * 5000 + b"\r\n\r\n",
        b"GET /" + b"a" * 5000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        GET + b"".join(b"X-%d: a\r\n" % i for i in range(2000)) + b"\r\n",
    ],
    ids=["one header", "address", "many headers"],
)
async def test_a_large_head_is_refused(start, request_bytes: bytes) -> None:
    running = await start()
    status, error = error_of(await running.exchange(request_bytes))
    assert status == 431
    assert set(error) == {"message", "type", "param", "code"}
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def _flood(writer: asyncio.StreamWriter) -> None:
    until = time.monotonic() + 5
    while time.monotonic() < until:
        writer.write(b"a" * 65536)
        await asyncio.wait_for(writer.drain(), 5)


async def test_an_endless_head_is_not_read_to_its_end(start) -> None:
    running = await start()
    _, writer = await running.connect()
    writer.write(GET + b"X-Fill: ")
    flood = asyncio.create_task(_flood(writer))
    with pytest.raises(ConnectionError):
        await flood
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")


async def test_a_body_does_not_count_as_head(start) -> None:
    running = await start()
    body = b"b" * 100_000
    request = b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await running.exchange(request + body)).startswith(b"HTTP/1.1 200")


async def test_what_is_not_http_gets_an_error_in_shape(start) -> None:
    running = await start()
    status, error = error_of(await running.exchange(b"\x16\x03\x01 not http\r\n\r\n"))
    assert (status, error["code"]) == (400, "invalid_http")


@pytest.mark.parametrize(
    "headers",
    [
        b"Host: x\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"Host: x\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n",
        b"Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n",
        b"Host: x\r\nContent-Length: 5\r\nContent-Length: 5\r\n",
        b"Host: x\r\nContent-Length: 5\r\nHost: y\r\n",
        b"Content-Length: 5\r\n",
    ],
)
async def test_a_head_that_may_be_read_in_two_ways_is_refused(start, headers: bytes) -> None:
    running = await start()
    answer = await running.exchange(b"POST /echo HTTP/1.1\r\n" + headers + b"\r\n5\r\nhello\r\n0\r\n\r\n")
    status, error = error_of(answer)
    assert status == 400
    assert "transfer" not in error["code"] or b"gzip" in headers
    assert running.app.num_calls == 0


async def test_a_head_that_does_not_come_ends_the_connection(start) -> None:
    running = await start(head_timeout_s=0.2)
    assert await running.exchange(b"") == b""
    status, _ = error_of(await running.exchange(GET))
    assert status == 408


async def test_the_time_for_a_head_starts_anew_on_a_kept_connection(start) -> None:
    running = await start(head_timeout_s=0.3)
    reader, writer = await running.connect()
    writer.write(GET + b"\r\n")
    assert (await reader.readuntil(b"0\r\n\r\n")).startswith(b"HTTP/1.1 200")
    await asyncio.sleep(0.5)  # idle between requests is keep-alive's business
    writer.write(GET)
    assert error_of(await asyncio.wait_for(reader.read(), 5))[0] == 408
    writer.close()


Connected = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connections(running: Running, *greetings: bytes) -> list[Connected]:
    """The first connections, one after another."""
    connected: list[Connected] = []
    connections = running.server.server_state.connections
    for greeting in greetings:
        connected.append(await running.connect())
        connected[-1][1].write(greeting)
        await eventually(lambda: len(connections) == len(connected))
    return connected


async def test_above_the_limit_those_that_do_nothing_give_way_the_longest_first(start) -> None:
    running = await start(max_connections=3)
    running.app.chunk, running.app.pause_s = b"x", 0.01
    held = await _connections(running, b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n", b"", GET)
    busy, silent, half = (reader for reader, _ in held)
    kept, writer = await running.connect()
    writer.write(GET + b"\r\n")
    assert await asyncio.wait_for(kept.readline(), 5) == b"HTTP/1.1 200 OK\r\n"
    assert await asyncio.wait_for(silent.read(), 5) == b""
    assert (await running.exchange(GET + b"Connection: close\r\n\r\n")).startswith(b"HTTP/1.1 200")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(half.read(), 5) == b""
    assert b"pagemill_connections_closed_total 2.0" in running.metrics.render()
    writer.write(GET + b"\r\n")
    await asyncio.wait_for(kept.readuntil(b"HTTP/1.1 200 OK\r\n"), 5)
    for _ in range(20):
        await asyncio.wait_for(busy.readuntil(b"1\r\nx\r\n"), 5)


async def test_above_the_limit_half_a_request_gives_way_and_so_does_who_can_ask_again(start) -> None:
    running = await start(max_connections=4)
    running.app.chunk, running.app.pause_s = b"x", 0.01
    upload = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\nhalf"
    watch, stream = b"GET /watch HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"
    in_line = GET + b"\r\n" + upload  # the first is answered, the second never comes
    held = await _connections(running, watch, stream, upload, in_line)
    watching, busy, half, behind = (reader for reader, _ in held)
    await asyncio.wait_for(watching.readuntil(b"data: 1\n\n"), 5)
    await asyncio.wait_for(busy.readuntil(b"1\r\nx\r\n"), 5)
    await asyncio.wait_for(behind.readuntil(b"0\r\n\r\n"), 5)
    for given_up in (half, behind, watching):
        newcomer, writer = await running.connect()
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(given_up.read(), 5)
        writer.write(stream)  # and stays
        await asyncio.wait_for(newcomer.readuntil(b"1\r\nx\r\n"), 5)
        held.append((newcomer, writer))
    late, _ = await running.connect()
    assert await asyncio.wait_for(late.read(), 5) == b"", "all are busy"
    await asyncio.wait_for(busy.readuntil(b"1\r\nx\r\n"), 5)
    for _, writer in held:
        writer.close()
    await eventually(lambda: not running.server.server_state.connections)
    assert running.server.config.places.first() is None


async def test_above_the_limit_where_all_are_busy_the_new_one_is_closed(start) -> None:
    running = await start(max_connections=3)
    running.app.chunk, running.app.pause_s = b"x", 0.01
    held = await _connections(running, *[b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n"] * 3)
    for reader, _ in held:
        await asyncio.wait_for(reader.readuntil(b"1\r\nx\r\n"), 5)
    reader, _ = await running.connect()
    assert await asyncio.wait_for(reader.read(), 5) == b""
    for reader, _ in held:
        await asyncio.wait_for(reader.readuntil(b"1\r\nx\r\n"), 5)


@pytest.mark.parametrize("path", [b"/stream", b"/past"])
async def test_a_stream_that_is_not_read_is_cut_off_and_counted(start, path: bytes) -> None:
    running = await start()
    _, writer = await running.connect(receive_buffer=4096)
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
    await asyncio.wait_for(running.app.gone.wait(), 10)
    assert running.slow_clients()
    writer.close()


@pytest.mark.parametrize("path", [b"/stream", b"/past"])
async def test_a_stream_that_is_read_goes_on(start, path: bytes) -> None:
    running = await start()
    reader, writer = await running.connect()
    running.app.chunk = b"x" * 100
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    for _ in range(2000):
        assert await asyncio.wait_for(reader.readexactly(106), 5) == b"64\r\n" + b"x" * 100 + b"\r\n"
    assert (running.app.num_past > 0) is (path == b"/past")
    assert not running.app.gone.is_set()
    assert not running.slow_clients()
    writer.close()


@pytest.mark.parametrize("path", [b"/event", b"/log"])
async def test_a_stream_that_is_there_at_once_waits_for_its_reader(start, path: bytes) -> None:
    running = await start()
    answer = await running.exchange(b"GET %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path)
    assert answer.count(b"z" * 1016) > 0.99 * (8 << 10)  # the rest is cut by a chunk's frame
    assert answer.endswith(b"\r\n0\r\n\r\n")
    assert not running.slow_clients()


@pytest.mark.parametrize("path", [b"/event", b"/log"])
async def test_it_does_not_wait_for_ever(start, path: bytes) -> None:
    running = await start(max_stall_s=0.3)
    _, writer = await running.connect(receive_buffer=4096)
    writer.write(b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
    for _ in range(100):
        await asyncio.sleep(0.1)
        check_stalls(running.server.server_state)
        if running.slow_clients():
            break
    assert running.slow_clients()
    writer.close()


async def test_a_large_plain_answer_waits_for_its_reader_but_not_for_ever(start) -> None:
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


# -- what is no HTTP, and requests in line ------------------------------------------------------------------------

POST_CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
SLOW = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"


def answers_of(received: bytes) -> list[tuple[int, bytes]]:
    """(status, body) of each answer, one after the other and nothing between them."""
    answers = []
    while received:
        head, _, rest = received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:])
        if b"content-length" in fields:
            size = int(fields[b"content-length"])
            body, received = rest[:size], rest[size:]
        else:
            assert fields[b"transfer-encoding"] == b"chunked"
            body = b""
            while True:
                size_text, _, rest = rest.partition(b"\r\n")
                size = int(size_text, 16)
                body, rest = body + rest[:size], rest[size + 2 :]
                if not size:
                    break
            received = rest
        answers.append((int(head.split()[1]), body))
    return answers


@pytest.mark.parametrize(
    "body", [b"zz\r\n", b"ffffffffffffffffff\r\n", b"2\r\nabcd\r\n", b"2\r\nab\r\n0\r\nno trailer\r\n\r\n"]
)
@pytest.mark.parametrize("later", [False, True])
async def test_a_body_in_broken_chunks_gets_an_error_in_shape(start, body: bytes, later: bool) -> None:
    running = await start()
    reader, writer = await running.connect()
    writer.write(POST_CHUNKED)
    if later:
        await asyncio.sleep(0.1)
    writer.write(body + b"and more of it\r\n")
    async with asyncio.timeout(5):
        status, error = error_of(await reader.read())
    assert (status, error["code"]) == (400, "invalid_http")
    assert running.app.num_calls == 0
    assert b'pagemill_errors_total{code="400"} 1.0' in running.metrics.render()
    writer.close()


@pytest.mark.parametrize("before", [GET + b"\r\n", SLOW, SLOW + GET + b"\r\n"], ids=["quick", "slow", "two"])
@pytest.mark.parametrize("behind", [b"GARBAGE\r\n\r\n", b'{"prompt": "a"}', GET + b"X: " + b"a" * 9000 + b"\r\n\r\n"])
@pytest.mark.parametrize("later", [False, True])
async def test_whole_requests_before_garbage_are_answered(start, before: bytes, behind: bytes, later: bool) -> None:
    running = await start()
    reader, writer = await running.connect()
    writer.write(before)
    if later:
        await asyncio.sleep(0.1)
    writer.write(behind)
    async with asyncio.timeout(5):
        *good, bad = answers_of(await reader.read())
    assert good == [(200, b"ok")] * before.count(b"GET")
    assert bad[0] == (431 if b"aaa" in behind else 400)
    assert json.loads(bad[1])["error"]["type"] == "invalid_request_error"
    writer.close()


async def test_a_broken_body_in_line_is_answered_in_its_turn(start) -> None:
    running = await start()
    good, bad = answers_of(await running.exchange(SLOW + POST_CHUNKED + b"zz\r\n"))
    assert good == (200, b"ok")
    assert bad[0] == 400


async def test_trailers_neither_count_as_headers_nor_grow_without_end(start) -> None:
    running = await start()
    chunks = b"5;x=y\r\nhello\r\n0\r\nX-Request-Id: trailer\r\n\r\n"
    received = await running.exchange(POST_CHUNKED + chunks + GET + b"Connection: close\r\n\r\n")
    assert answers_of(received) == [(200, b"hello"), (200, b"ok")]
    assert b"trailer" not in received
    for endless in (b"X: " + b"a" * 10_000, b"X: a\r\n" * 2000):
        reader, writer = await running.connect()
        writer.write(POST_CHUNKED + b"0\r\n")
        await asyncio.sleep(0.05)
        writer.write(endless)
        assert error_of(await asyncio.wait_for(reader.read(), 5))[0] == 431
        writer.close()


@pytest.mark.parametrize("split", [None, 30, 90])
async def test_an_offer_to_upgrade_costs_no_body(start, split: int | None) -> None:
    running = await start()
    head = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    request = head + b"HTTP2-Settings: AAE\r\nContent-Length: 5\r\n\r\nhello"
    _, writer = connection = await running.connect()
    writer.write(request[:split])
    await asyncio.sleep(0.05)
    writer.write((request[split:] if split else b"") + GET + b"Connection: close\r\n\r\n")
    assert answers_of(await asyncio.wait_for(connection[0].read(), 5)) == [(200, b"hello"), (200, b"ok")]
    writer.close()


async def test_requests_in_one_packet_are_answered_in_order(start) -> None:
    running = await start()
    posts = b"".join(b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n%02d\r\n" % i for i in range(50))
    answers = answers_of(await running.exchange(SLOW + posts + GET + b"Connection: close\r\n\r\n"))
    assert answers == [(200, b"ok"), *((200, b"%02d" % i) for i in range(50)), (200, b"ok")]


async def test_a_long_line_of_requests_is_answered_as_far_as_it_may_be(start) -> None:
    running = await start()
    answers = answers_of(await running.exchange(SLOW + (GET + b"\r\n") * 2000))
    assert answers[:-1] == [(200, b"ok")] * (1 + MAX_LINE)
    assert answers[-1][0] == 429
    assert running.app.num_calls == 1 + MAX_LINE


@pytest.mark.parametrize("behind", [b"\r\n", b"GE", GET], ids=["empty line", "two bytes", "half a head"])
async def test_bytes_behind_a_request_do_not_end_its_answer(start, behind: bytes) -> None:
    running = await start(head_timeout_s=0.2)
    running.app.chunk, running.app.pause_s = b"x", 0.01
    reader, writer = await running.connect()
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n")
    await asyncio.sleep(0.1)
    writer.write(behind)
    for _ in range(60):  # over 0.6 s of a stream
        await asyncio.wait_for(reader.readuntil(b"1\r\nx\r\n"), 5)
    assert not running.app.gone.is_set()
    writer.close()
    await asyncio.wait_for(running.app.gone.wait(), 5)


async def test_half_a_head_behind_an_answer_is_late_after_it(start) -> None:
    running = await start(head_timeout_s=0.2)
    good, bad = answers_of(await running.exchange(SLOW + GET))
    assert (good, bad[0]) == ((200, b"ok"), 408)


@pytest.mark.parametrize("in_line", [b"", GET + b"\r\n", (GET + b"\r\n") * 3], ids=["alone", "one", "three"])
async def test_a_client_that_leaves_is_noticed_with_requests_in_line(start, in_line: bytes) -> None:
    running = await start()
    running.app.chunk, running.app.pause_s = b"x", 60.0  # nothing is written that could fail
    _, writer = await running.connect()
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n" + in_line)
    await asyncio.sleep(0.2)
    check_stalls(running.server.server_state)
    await asyncio.sleep(0.1)
    assert not running.app.gone.is_set()
    writer.close()
    await asyncio.sleep(0.2)
    check_stalls(running.server.server_state)
    await asyncio.wait_for(running.app.gone.wait(), 5)
    assert running.app.num_calls == 1
    assert not running.server.server_state.connections


async def test_a_stream_that_is_not_read_is_cut_off_with_requests_in_line(start) -> None:
    running = await start()
    _, writer = await running.connect(receive_buffer=4096)
    writer.write(b"GET /stream HTTP/1.1\r\nHost: x\r\n\r\n" + GET + b"\r\n")
    await asyncio.wait_for(running.app.gone.wait(), 10)
    assert running.slow_clients()
    writer.close()


async def test_a_refused_upload_is_told_and_then_ends(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "LINGER_S", 0.3)
    running = await start()
    reader, writer = await running.connect()
    writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
    flood = asyncio.create_task(_flood(writer))
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert head.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in head.lower()
    with pytest.raises(ConnectionError):
        await flood
    assert running.app.num_calls == 0


@pytest.mark.parametrize("path", [b"/", b"/length", b"/large"])
async def test_http_1_0_gets_no_chunks(start, path: bytes) -> None:
    running = await start()
    head, _, body = (await running.exchange(b"GET %b HTTP/1.0\r\nHost: x\r\n\r\n" % path)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    assert (b"content-length: 2" in head.lower()) is (path == b"/length")
    assert body == (b"y" * (4 << 20) if path == b"/large" else b"ok")


@pytest.mark.parametrize("path", [b"/stream", b"/past"])
async def test_http_1_0_gets_its_stream_as_it_comes(start, path: bytes) -> None:
    running = await start()
    running.app.chunk, running.app.pause_s = b"x", 0.01
    reader, writer = await running.connect()
    writer.write(b"GET %b HTTP/1.0\r\nHost: x\r\n\r\n" % path)
    await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    assert await asyncio.wait_for(reader.readexactly(20), 5) == b"x" * 20
    writer.close()
    await asyncio.wait_for(running.app.gone.wait(), 5)
