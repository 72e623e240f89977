"""What a connection's transport is asked beyond asyncio: to write past ASGI, what is not sent yet, who left."""

from __future__ import annotations

import array
import asyncio
import fcntl
import select
import termios

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class ChunkWriter:
    """`middleware.Shortcut`: pieces of one answer in HTTP's chunked coding. Closed before the head is out, behind the
    last piece, where the coding is another, and while the client has too much to read."""

    __slots__ = ("_cycle", "_flow", "_transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def is_open(self) -> bool:
        cycle = self._cycle
        return (
            cycle.chunked_encoding is True
            and not self._flow.write_paused
            and not cycle.disconnected
            and not cycle.response_complete
        )

    def write(self, body: bytes) -> None:
        self._transport.write(b"%x\r\n%b\r\n" % (len(body), body))


def unsent_by_kernel(transport: asyncio.Transport) -> int:
    """Bytes in the kernel's send buffer that the client has not acknowledged; 0 where the system cannot tell."""
    answer = array.array("i", [0])
    try:
        fcntl.ioctl(_file_of(transport), termios.TIOCOUTQ, answer)
    except (OSError, ValueError):
        return 0
    return answer[0]


def hung_up(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its side or the connection, told without reading (the former by Linux alone)."""
    poll = select.poll()
    try:
        poll.register(_file_of(transport), getattr(select, "POLLRDHUP", 0))
    except ValueError:
        return True
    return bool(poll.poll(0))


def _file_of(transport: asyncio.Transport) -> int:
    """-1 for one that is closed: for a moment its protocol does not know."""
    connected = transport.get_extra_info("socket")
    return -1 if connected is None else int(connected.fileno())
