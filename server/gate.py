"""Where connections come in: taken from the listening socket and handed to the event loop, which first shakes hands if
there is TLS. Whoever never begins or ends that must not shut out the others: all who are on the way are counted here.
Knows nothing of HTTP; what has come in is counted by `connections.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from server.places import Crowd

logger = logging.getLogger("pagemill.server")

BURST = 32  # connections taken in one turn of the event loop: in the next, answers go on
STARTS = 8  # handshakes begun in one turn: each computes for half a millisecond or more
RETRY_S = 0.1  # the system cannot give us a connection: ask again after this long
LOG_EVERY_S = 60.0
HANDSHAKE, HEADER = 0x16, 5  # a TLS record's kind, and the bytes before its content: kind, version, length
MAX_RECORD = 16384 + HEADER


@dataclass(frozen=True, slots=True)
class GateLimits:
    """max_callers: connections that are on their way. Times are seconds, of TLS alone; goodbye_s: in which the last
    answer must have left."""

    max_callers: int
    handshake_s: float
    goodbye_s: float


@dataclass(slots=True, eq=False)
class Caller:
    """A connection that is on its way. address: the group it counts for."""

    connected: socket.socket
    address: bytes
    timer: asyncio.TimerHandle | None = None
    wanted: int = 0  # bytes it is waited for
    is_handed_over: bool = False  # the socket is the event loop's


class Gate:
    """One listening socket's. In the place of asyncio's server:

    - More than `max_callers` on their way: the oldest of the address that has the most of them is closed.
    - TLS costs nothing before a client has sent the whole first record of its handshake. From then on addresses take
      turns, and few handshakes begin in each turn of the event loop.
    - Whoever has not sent that within `handshake_s`, or not ended the handshake as long after it began, is closed; the
      time between the two, in line, is not theirs. None of this is logged: strangers could fill the log.
    - Where the system gives no more open files, we ask again a little later, and say so once a minute.
    """

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], asyncio.Protocol],
        limits: GateLimits,
        certificate: Callable[[], ssl.SSLContext | None],
        on_pushed_out: Callable[[], None],
    ) -> None:
        """make: the protocol of a new connection. certificate: what the next handshake shall show; None: no TLS."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make = make
        self._limits = limits
        self._certificate = certificate
        self._on_pushed_out = on_pushed_out
        self._callers: Crowd[Caller] = Crowd()
        self._line: Crowd[Caller] = Crowd()  # whose handshake may begin
        self._is_beginning = False
        self._handing_over: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._told_s: float | None = None

    def open(self, backlog: int) -> None:
        """backlog: how many the kernel holds before they are taken."""
        self._listener.setblocking(False)
        self._listener.listen(backlog)
        self._loop.add_reader(self._listener, self._accept)

    def close(self) -> None:
        """Nobody comes in any more, and who is on the way is closed. The listener's owner closes it."""
        if self._retry is not None:
            self._retry.cancel()
        self._loop.remove_reader(self._listener)
        for caller in self._callers:
            self._dismiss(caller)

    async def wait_closed(self) -> None:
        """Until the event loop has let go of everybody."""
        if self._handing_over:
            await asyncio.wait(self._handing_over)

    @property
    def num_callers(self) -> int:
        return len(self._callers)

    # -- taking -------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        for _ in range(BURST):
            try:
                connected, peer = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                self._rest(error)
                return
            self._take(connected, peer)

    def _rest(self, error: OSError) -> None:
        """The connections that wait would wake us at once, for nothing."""
        self._loop.remove_reader(self._listener)
        self._retry = self._loop.call_later(RETRY_S, self._loop.add_reader, self._listener, self._accept)
        self._push_out()
        now = time.monotonic()
        if self._told_s is None or now - self._told_s >= LOG_EVERY_S:
            self._told_s = now
            logger.error("cannot take a connection, asking again and again: %s", error.strerror)

    def _take(self, connected: socket.socket, peer: Any) -> None:
        connected.setblocking(False)
        if len(self._callers) >= self._limits.max_callers:
            self._push_out()
        caller = Caller(connected, group_of(connected.family, peer))
        self._callers.add(caller.address, caller)
        if self._certificate() is None:
            self._hand_over(caller)
            return
        caller.timer = self._loop.call_later(self._limits.handshake_s, self._dismiss, caller)
        self._look(caller)

    def _push_out(self) -> None:
        caller = self._callers.first_of_largest()
        if caller is not None:
            self._on_pushed_out()
            self._dismiss(caller)

    def _dismiss(self, caller: Caller) -> None:
        self._forget(caller)
        if caller.is_handed_over:  # to the loop, which finds its end
            with contextlib.suppress(OSError):
                caller.connected.shutdown(socket.SHUT_RDWR)
            return
        self._line.remove(caller.address, caller)
        self._loop.remove_reader(caller.connected)
        caller.connected.close()

    def _forget(self, caller: Caller) -> None:
        self._callers.remove(caller.address, caller)
        self._stop_clock(caller)

    def _stop_clock(self, caller: Caller) -> None:
        if caller.timer is not None:
            caller.timer.cancel()
            caller.timer = None

    # -- TLS ----------------------------------------------------------------------------------------------------

    def _look(self, caller: Caller) -> None:
        """What has come stays in the kernel, which wakes us when all that is `wanted` is there. If it did with less,
        then no more will come, or it cannot wait for so much: TLS finds out."""
        try:
            is_ready = self._is_ready(caller)
        except OSError:
            self._dismiss(caller)
            return
        if not is_ready:
            return
        self._stop_clock(caller)
        self._line.add(caller.address, caller)
        if not self._is_beginning:
            self._is_beginning = True
            self._loop.call_soon(self._begin)

    def _is_ready(self, caller: Caller) -> bool:
        """Raises OSError if it has left, or speaks no TLS."""
        connected = caller.connected
        try:
            seen = connected.recv(MAX_RECORD, socket.MSG_PEEK)
        except BlockingIOError:
            seen = b""
        else:
            if not seen:
                raise ConnectionResetError
        wanted = first_record(seen)
        if wanted is None:
            raise ConnectionAbortedError
        if len(seen) < wanted and caller.wanted < wanted:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
            if not caller.wanted:
                self._loop.add_reader(connected, self._look, caller)
            caller.wanted = wanted
            return False
        if caller.wanted:
            self._loop.remove_reader(connected)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return True

    def _begin(self) -> None:
        for _ in range(STARTS):
            caller = self._line.next()
            if caller is None:
                self._is_beginning = False
                return
            self._hand_over(caller)
        self._loop.call_soon(self._begin)

    # -- handing over -------------------------------------------------------------------------------------------

    def _hand_over(self, caller: Caller) -> None:
        caller.is_handed_over = True
        task = self._loop.create_task(self._connect(caller))
        self._handing_over.add(task)
        task.add_done_callback(self._handing_over.discard)

    async def _connect(self, caller: Caller) -> None:
        certificate, limits = self._certificate(), self._limits
        try:
            await self._loop.connect_accepted_socket(
                self._make,
                caller.connected,
                ssl=certificate,
                ssl_handshake_timeout=limits.handshake_s if certificate is not None else None,
                ssl_shutdown_timeout=limits.goodbye_s if certificate is not None else None,
            )
        except OSError:  # gone, no TLS, or no certificate of ours is trusted
            pass
        finally:
            self._forget(caller)


def first_record(seen: bytes) -> int | None:
    """How many bytes must have come before a handshake is worth its work, as far as `seen` tells: those of its first
    record. None: it is no handshake."""
    if seen and seen[0] != HANDSHAKE:
        return None
    if len(seen) < HEADER:
        return HEADER
    size = HEADER + int.from_bytes(seen[3:HEADER], "big")
    return size if size <= MAX_RECORD else None


def group_of(family: int, peer: Any) -> bytes:
    """What counts as one address: of IPv6, where everybody has billions of them, the 64 bits of its network."""
    host: str = peer[0]
    if family != socket.AF_INET6:
        return host.encode()
    packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return packed if packed.startswith(bytes(10) + b"\xff\xff") else packed[:8]  # the former is IPv4's
