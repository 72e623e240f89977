"""The events of one response, kept while it runs and after, and the stream that tells them to whoever asks: from the
first one, or from where a dropped connection left off.

Events are numbered from 0 by their `sequence_number`; they are kept as they were sent, back to back. A reader gets
whole events, and where they are forgotten before it has them all, an event that says so.
"""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.metrics import Metrics
from server.middleware import give_way
from server.protocol.errors import ApiError
from server.sse import client_gone

END = b"\n\n"  # of an event; JSON has no line breaks
PING = b": ping\n\n"
MAX_WRITE = 64 << 10  # bytes that one write takes of a log, unless a single event has more
LOG_BYTES = 512  # what a log costs beside its events
OFFSET_BYTES = 8
LOST = "The events of this response are no longer kept: ask for the response without stream."


class EventLog:
    """Grows by `append` and is told by `publish`, both on the event loop. `drop` may come from any thread once the log
    has ended; its readers then end, too."""

    def __init__(self) -> None:
        self.ended = False  # nothing more will come
        self.dropped = False  # the events are gone
        self._data: bytearray | bytes = bytearray()
        self._ends = array("Q")  # [number of events], the offset behind each
        self._num_told = 0  # bytes that readers may see
        self._news = asyncio.Event()

    @property
    def num_bytes(self) -> int:
        return len(self._data) + OFFSET_BYTES * len(self._ends) + LOG_BYTES

    def append(self, events: bytes) -> None:
        """Whole events, which nobody sees before `publish`."""
        if self.dropped:
            return
        assert isinstance(self._data, bytearray)
        start, found = len(self._data), events.find(END)
        while found >= 0:
            self._ends.append(start + found + len(END))
            found = events.find(END, found + len(END))
        self._data += events

    def publish(self, *, ended: bool = False) -> None:
        if ended and not self.ended:
            self.ended = True
            self._data, self._ends = bytes(self._data), self._ends[:]  # without the room to grow
        self._num_told = len(self._data)
        news, self._news = self._news, asyncio.Event()
        news.set()

    def drop(self) -> None:
        """Forget the events: whoever reads has to be told."""
        self.dropped = True
        self._data, self._ends, self._num_told = b"", array("Q"), 0
        if not self.ended:
            self.publish(ended=True)

    def offset_behind(self, number: int) -> int | None:
        """Where the events behind event `number` begin; None if there is no such event."""
        ends = self._ends
        return ends[number] if number < len(ends) else None

    def number_at(self, offset: int) -> int:
        """The number of the event that begins there."""
        return bisect_right(self._ends, offset)

    def read(self, offset: int) -> bytes:
        """What is told from there on: whole events, of MAX_WRITE bytes in all, or one that is larger."""
        end, ends = min(offset + MAX_WRITE, self._num_told), self._ends
        if offset < end < self._num_told:
            within = bisect_right(ends, end) - 1
            first = bisect_right(ends, offset)
            end = ends[max(within, first)]
        return bytes(self._data[offset:end])

    async def grown(self) -> None:
        """Returns when there is more, or the end."""
        if not self.ended:
            await self._news.wait()


class LogStream(Response):
    """A log as server-sent events. A client that leaves takes nothing with it.

    offset: where in the log it begins. keep_alive_s: a comment breaks this much silence (0: never)."""

    media_type = "text/event-stream"

    def __init__(self, log: EventLog, offset: int, *, metrics: Metrics, keep_alive_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._log = log
        self._offset = offset
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.get("state", {})
        if (exchange := state.get("exchange")) is not None:
            exchange.replays = True  # megabytes may be there at once; the log holds them, whether it is read or not
        give_way(scope)
        telling = asyncio.create_task(self._tell(send))
        gone = asyncio.create_task(client_gone(receive))
        try:
            await asyncio.wait({telling, gone}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
            else:
                self._metrics.client_disconnected()
        finally:
            telling.cancel()
            gone.cancel()

    async def _tell(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        log, offset, last = self._log, self._offset, b""
        number = log.number_at(offset)
        while True:
            if body := log.read(offset):
                offset += len(body)
                number += body.count(END)
            elif log.ended:
                last = lost(number) if log.dropped else b""
                break
            else:
                try:
                    async with asyncio.timeout(self._keep_alive_s):
                        await log.grown()
                    continue
                except TimeoutError:
                    body = PING
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": last, "more_body": False})


def lost(number: int) -> bytes:
    """The last event of a reader whose next one would have had this number, in the form of the writer's errors."""
    error = ApiError(503, LOST)
    told = {"code": error.code, "message": error.message, "param": error.param}
    fields = {"type": "error", "sequence_number": number, **told, "error": {"type": error.type, **told}}
    return b"event: error\ndata: " + orjson.dumps(fields) + END
