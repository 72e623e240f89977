"""Connections on their way in: floods of those that never end their TLS handshake, and a system that gives no more."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import os
import random
import signal
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from server.gate import BURST, STARTS, Caller, Gate, GateLimits, first_record, group_of
from server.places import Crowd
from tests.server.harness import eventually
from tests.server.process import ServerProcess, stub_server
from tests.server.test_tls import certificate

MAX = 60  # connections, and as many more on their way
FLOOD = 400
OTHER = "127.0.0.2"


def hello(name: str = "localhost") -> bytes:
    """What a client says first."""
    outgoing = ssl.MemoryBIO()
    client = ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


class Served:
    """A server process over TLS, and its clients."""

    def __init__(self, server: ServerProcess, cert: Path) -> None:
        self.server = server
        self.context = ssl.create_default_context(cafile=str(cert))
        self.url = server.url.replace("http:", "https:")
        self.until(lambda: "ready: serving" in server.log)
        assert self.ask() == 200  # what a first request opens is open now
        self.until(lambda: self.ask() == 200 and self.num_sockets == 1)
        self.num_files = self.count_files()

    def until(self, condition: Callable[[], object]) -> None:
        for _ in range(1500):
            if condition():
                return
            assert self.server.process.poll() is None, self.server.log
            time.sleep(0.02)
        raise AssertionError(f"it never came to be; {self.num_sockets} sockets\n{self.server.log}")

    def ask(self, address: str = "127.0.0.1") -> int:
        transport = httpx.HTTPTransport(verify=self.context, local_address=address, trust_env=False)
        with httpx.Client(transport=transport, timeout=30) as client:
            return client.get(self.url + "/health").status_code

    def connect(self, first: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        connected = socket.create_connection(("127.0.0.1", self.server.port), source_address=(address, 0))
        with contextlib.suppress(ConnectionError):
            connected.sendall(first)
        return connected

    def until_all_left(self) -> None:
        """A socket that is shut down has no port any more and is closed a moment later."""
        self.until(lambda: self.num_sockets == 1 and self.count_files() <= self.num_files)

    def count_files(self) -> int:
        return len(os.listdir(f"/proc/{self.server.pid}/fd"))

    @property
    def num_sockets(self) -> int:
        """Of clients, with the listener."""
        port = f":{self.server.port:04X}"
        lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
        inodes = {f"socket:[{line[9]}]" for line in lines if line[1].endswith(port)}
        return sum(target in inodes for target in self._targets())

    def _targets(self) -> Iterator[str]:
        folder = f"/proc/{self.server.pid}/fd"
        for name in os.listdir(folder):
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(f"{folder}/{name}")


@pytest.fixture(params=[(), ("--uvloop",)], ids=["asyncio", "uvloop"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[int], Served]]:
    cert, key = certificate(tmp_path)
    with contextlib.ExitStack() as stack:

        def start(client_timeout: int) -> Served:
            settings = [f"tls_cert={cert}", f"tls_key={key}", f"max_connections={MAX}"]
            settings.append(f"client_timeout={client_timeout}")
            switches = itertools.chain.from_iterable(("--set", each) for each in settings)
            return Served(stack.enter_context(stub_server(tmp_path / "log", *request.param, *switches)), cert)

        yield start


@pytest.fixture
def served(serve: Callable[[int], Served]) -> Served:
    return serve(60)


FIRST = {"silent": b"", "half a word": hello()[:-1], "half a handshake": hello()}


@pytest.mark.parametrize("first", FIRST.values(), ids=list(FIRST))
def test_who_is_late_is_cut_off(serve: Callable[[int], Served], first: bytes) -> None:
    served = serve(1)
    late = served.connect(first)
    late.settimeout(30)
    with contextlib.suppress(ConnectionError):
        while late.recv(1 << 16):  # of half a handshake there is an answer
            pass
    late.close()
    served.until_all_left()


@pytest.mark.parametrize("first", FIRST.values(), ids=list(FIRST))
def test_who_never_ends_a_handshake_shuts_out_nobody(served: Served, first: bytes) -> None:
    early = served.connect(address=OTHER)  # on its way before the flood, and it does not give way
    flood = []
    for _ in range(FLOOD):
        flood.append(served.connect(first))
        assert served.count_files() <= served.num_files + MAX + 2 * BURST, "some of whom are just being closed"
    assert served.ask(OTHER) == 200
    assert served.ask() == 200, "nor are others of the same address shut out"
    with served.context.wrap_socket(early, server_hostname="127.0.0.1") as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    for connected in flood:
        connected.close()
    served.until_all_left()
    assert served.ask() == 200


def test_no_handshake_that_fails_fills_the_log(served: Served) -> None:
    served.server.signal(signal.SIGHUP)  # from here on, too, with a certificate that came later
    served.until(lambda: "info reloaded" in served.server.log)
    before = served.server.log
    no_ascii = hello().replace(b"localhost", b"\xff" * 9)
    kinds = [
        no_ascii,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        os.urandom(400),
        b"\x16\x03\x01\x00\x05hello",
        b"\x80",
        b"\x16\xff",
        b"\x16\x03\x01\xff\xff" + bytes(70_000),
        b"",
        hello()[:50],
        hello() + b"and no more of it",
    ]
    for first, reset in itertools.product(kinds * 5, (False, True)):
        connected = served.connect(first)
        if reset:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connected.close()
    served.until_all_left()
    assert served.ask() == 200
    log = [line for line in served.server.log.removeprefix(before).splitlines() if "/health" not in line]
    assert log == []


def test_a_handshake_may_come_byte_by_byte(served: Served) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = served.context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    connected = served.connect()
    connected.settimeout(30)
    is_done = False
    while not is_done:
        try:
            client.do_handshake()
            is_done = True
            client.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        except ssl.SSLWantReadError:
            pass
        for byte in outgoing.read():
            connected.sendall(bytes([byte]))
            time.sleep(0.0005)
        if not is_done:
            incoming.write(connected.recv(1 << 16))
    answer = b""
    while b"ready" not in answer:
        incoming.write(connected.recv(1 << 16))
        with contextlib.suppress(ssl.SSLWantReadError):
            answer += client.read(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200")
    connected.close()


def test_who_is_on_the_way_does_not_hold_up_the_end(served: Served) -> None:
    waiting = [served.connect(first) for first in FIRST.values() for _ in range(5)]
    served.until(lambda: served.num_sockets == 16)
    served.server.signal()
    assert served.server.wait(30) == 0
    assert "graceful" not in served.server.log
    assert "Traceback" not in served.server.log
    for connected in waiting:
        connected.close()


# -- without a process ---------------------------------------------------------------------------------------------


class Reluctant(socket.socket):
    """A listener that gives nothing for the first `refusals` times."""

    refusals = 0
    num_asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.num_asked += 1
        if self.num_asked <= self.refusals:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return super().accept()


class Greeting(asyncio.Protocol):
    """Says "hello" and ends."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


async def test_a_system_that_gives_no_more_files_is_asked_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.gate.RETRY_S", 0.01)
    with Reluctant() as listener:
        listener.refusals = 5
        listener.bind(("127.0.0.1", 0))
        turns = 0

        def turn() -> None:
            nonlocal turns
            turns += 1
            asyncio.get_running_loop().call_soon(turn)

        gate = Gate(listener, Greeting, GateLimits(9, 10, 10), lambda: None, lambda: None)
        gate.open(BURST)
        turn()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await asyncio.wait_for(reader.read(), 10) == b"hello"
        writer.close()
        await eventually(lambda: gate.num_callers == 0)
        assert turns > 5 * 10, "it does not spin"
        assert listener.num_asked <= 5 + 2
        assert caplog.text.count("cannot take a connection") == 1
        gate.close()
        await gate.wait_closed()


async def test_few_handshakes_begin_in_a_turn_of_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listener, contextlib.ExitStack() as open_sockets:
        gate = Gate(listener, Greeting, GateLimits(9, 10, 10), lambda: None, lambda: None)
        begun: list[Caller] = []
        monkeypatch.setattr(gate, "_hand_over", begun.append)
        for number in range(3 * STARTS):
            gate._line.add(bytes([number % 2]), Caller(open_sockets.enter_context(socket.socket()), b""))
        gate._begin()
        assert len(begun) == STARTS
        for turn in (2, 3, 3):
            await asyncio.sleep(0)
            assert len(begun) == turn * STARTS


def test_the_first_of_those_who_are_most_gives_way_and_addresses_take_turns() -> None:
    crowd: Crowd[str] = Crowd()
    for holder in ("a1", "b1", "a2", "c1", "a3", "b2"):
        crowd.add(holder[:1].encode(), holder)
    assert crowd.first_of_largest() == "a1"
    crowd.remove(b"a", "a1")
    assert crowd.first_of_largest() == "b1", "it has been that many for longer"
    crowd.remove(b"a", "a1")
    assert len(crowd) == 5
    assert [crowd.next() for _ in range(6)] == ["a2", "b1", "c1", "a3", "b2", None]
    assert (len(crowd), crowd.first_of_largest(), list(crowd)) == (0, None, [])


def test_a_crowd_knows_who_is_most_whatever_happens() -> None:
    random_ = random.Random(1)
    crowd: Crowd[int] = Crowd()
    held: dict[bytes, list[int]] = {}
    for number in range(5000):
        address = bytes([min(random_.randrange(12), random_.randrange(12))])
        if random_.random() < 0.5:
            crowd.add(address, number)
            held.setdefault(address, []).append(number)
        elif random_.random() < 0.3:
            if (taken := crowd.next()) is not None:
                next(each for each in held.values() if each and each[0] == taken).pop(0)
        elif held.get(address):
            gone = random_.choice(held[address])
            held[address].remove(gone)
            crowd.remove(address, gone)
        most = max(map(len, held.values()), default=0)
        assert len(crowd) == sum(map(len, held.values()))
        first = crowd.first_of_largest()
        assert first is None if most == 0 else first in [each[0] for each in held.values() if len(each) == most]


def test_an_address_is_what_one_client_can_have() -> None:
    six = socket.AF_INET6
    assert group_of(socket.AF_INET, ("10.0.0.1", 5)) != group_of(socket.AF_INET, ("10.0.0.2", 5))
    assert group_of(six, ("2001:db8::1", 5, 0, 0)) == group_of(six, ("2001:db8::ffff:1", 6, 0, 0))
    assert group_of(six, ("2001:db8::1", 5, 0, 0)) != group_of(six, ("2001:db8:0:1::1", 5, 0, 0))
    assert group_of(six, ("::ffff:10.0.0.1", 5, 0, 0)) != group_of(six, ("::ffff:10.0.0.2", 5, 0, 0))
    assert group_of(six, ("fe80::1%lo", 5, 0, 1)) == group_of(six, ("fe80::2", 5, 0, 1))


def test_a_handshake_is_waited_for_as_far_as_it_tells_its_length() -> None:
    word = hello()
    assert [first_record(word[:size]) for size in (0, 4, 5, len(word))] == [5, 5, len(word), len(word)]
    assert first_record(b"G") is None
    assert first_record(b"\x16\x03\x01\xff\xff") is None, "no record is so long"
