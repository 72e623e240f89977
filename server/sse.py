"""The two ways an answer leaves: as server-sent events, or collected and plain. Both watch the client.

A stream's three ends, all of which close the engine's side in one `finally`:

| end                          | what the client sees            | counted as       |
|------------------------------|---------------------------------|------------------|
| last finish_reason           | usage if asked for, [DONE]      |                  |
| failure after the first byte | an error event, [DONE]          | error            |
| client gone                  | nothing                         | client left      |

A client that does not read is cut off by `server/connections.py`; here it looks like one that left. Tokens that
arrive while a write waits for the client are merged by the engine's hand-over: fewer, larger events.

A token that ends nothing wakes no task: the engine's delivery renders it and writes it, where the server lets pieces
of a body past ASGI (`middleware.Shortcut`). All else, and all that another server serves, goes through `_pump`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.outputs import EngineError, SequenceOutput
from engine.text import Piece
from server.assemble import Answer
from server.metrics import Metrics
from server.middleware import Exchange
from server.protocol.answers import AnswerWriter
from server.protocol.errors import CLIENT_CLOSED, ApiError, to_api_error
from server.tracing import Trace

logger = logging.getLogger("pagemill.server")

# Rendering more than this would hold up the event loop; less is not worth a thread.
MANY_ENTRIES = 64  # logprobs of tokens, each with 20 alternatives
MANY_TOKENS = 2048  # of a plain answer, whose text is parsed and whose thinking is counted

ErrorView = Callable[[Exception], ApiError]


async def collect(
    answer: Answer,
    writer: AnswerWriter,
    receive: Receive,
    *,
    metrics: Metrics,
    error_view: ErrorView = to_api_error,
) -> Response:
    """The plain answer. Raises ApiError if the request failed; aborts it when the client leaves."""
    pieces: list[list[Piece]] = [[] for _ in range(answer.num_choices)]
    writer.pieces = pieces
    watch = asyncio.create_task(client_gone(receive))
    watch.add_done_callback(lambda _: answer.close())  # ends the loop below

    def keep(outputs: Sequence[SequenceOutput]) -> bool:
        for index, piece in answer.take(outputs):
            pieces[index].append(piece)
        return True

    answer.stream.pass_to(keep)
    try:
        async for outputs in answer.stream:
            keep(outputs)
    except EngineError as error:
        told = error_view(error)
        logger.log(_level(told), "request %s failed: %s", writer.id, error)
        raise told from error
    finally:
        answer.close()
        watch.cancel()
    if any(not parts or parts[-1].finish_reason is None for parts in pieces) and not writer.is_cancelled:
        metrics.client_disconnected()
        return Response(status_code=CLIENT_CLOSED)  # nobody is there to read it
    usage, pieces = answer.usage(), answer.kept(pieces)
    num_entries = sum(len(piece.entries) for parts in pieces for piece in parts)
    is_long = num_entries + answer.num_prompt_logprobs > MANY_ENTRIES or usage.num_completion_tokens > MANY_TOKENS
    if is_long or writer.is_cancelled:
        body = await asyncio.to_thread(writer.answer, pieces, usage)
    else:
        body = writer.answer(pieces, usage)
    return Response(body, media_type="application/json")


async def client_gone(receive: Receive) -> None:
    """Returns when the client has gone. The body was read before, so nothing else is awaited here."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _level(told: ApiError) -> int:
    """A shutdown is no fault of ours, and a client's mistake no event at all."""
    if told.status < 500:
        return logging.INFO
    return logging.WARNING if told.status == 503 else logging.ERROR


class EventStream(Response):
    """The streamed answer, an ASGI application of its own.

    keep_alive_s: a comment is sent after this much silence, so that proxies keep the connection (0: never)."""

    media_type = "text/event-stream"

    def __init__(
        self,
        answer: Answer,
        writer: AnswerWriter,
        *,
        metrics: Metrics,
        keep_alive_s: float = 15.0,
        error_view: ErrorView = to_api_error,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._answer = answer
        self._writer = writer
        self._metrics = metrics
        self._keep_alive_s = keep_alive_s
        self._error_view = error_view
        self._last_write = 0.0  # monotonic seconds
        self._begun: set[int] = set()  # choices whose prompt was told, where prompts have logprobs
        self._num_open = answer.num_choices  # without a finish_reason
        self._last = b""  # what the sink has left for the pump to write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        state = scope.get("state", {})
        self._exchange: Exchange | None = state.get("exchange")
        self._trace: Trace | None = state.get("trace")
        self._last_write = time.monotonic()
        try:
            async with asyncio.timeout(None) as deadline:
                attendant = asyncio.create_task(self._attend(receive, deadline))
                try:
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await self._pump()
                finally:
                    attendant.cancel()
        except TimeoutError:  # the attendant's word: nobody is there any more
            self._metrics.client_disconnected()
        finally:
            self._answer.close()

    async def _pump(self) -> None:
        """From the engine's deliveries to the socket: one write per delivery."""
        answer = self._answer
        body = b""
        try:
            if first := self._writer.first_events(answer.usage()):
                await self._write(first, more=True)
            answer.stream.pass_to(self._pass_on)
            async for outputs in answer.stream:
                pieces = answer.take(outputs)
                if self._num_entries(pieces) > MANY_ENTRIES:
                    body = await asyncio.to_thread(self._render, pieces)
                else:
                    body = self._render(pieces)
                if not self._num_open:
                    break
                if body:
                    await self._write(body, more=True)
                    body = b""
            body = self._last + body + self._writer.last_events(answer.usage())
        except Exception as error:  # the status line is out: a failure must become an event, whatever it is
            body = self._writer.error_events(self._told(error))
        await self._write(body, more=False)

    def _pass_on(self, outputs: Sequence[SequenceOutput]) -> bool:
        """The stream's sink: straight to the socket. A stop string may be found here; the pump ends the answer."""
        exchange = self._exchange
        if exchange is None or not exchange.can_write or self._may_take_long(outputs):
            return False
        body = self._render(self._answer.take(outputs))
        if not self._num_open:
            self._last = body
        elif body:
            exchange.write(body)
            self._last_write = time.monotonic()
        return True

    def _may_take_long(self, outputs: Sequence[SequenceOutput]) -> bool:
        num_tokens = 0
        for output in outputs:
            if output.prompt_logprobs:
                return True
            num_tokens += len(output.token_ids)
        return num_tokens > MANY_ENTRIES or self._answer.num_prompt_logprobs > 0

    def _render(self, pieces: Sequence[tuple[int, Piece]]) -> bytes:
        events = []
        for index, piece in pieces:
            events.append(self._writer.event(index, piece))
            if piece.finish_reason is not None:
                self._num_open -= 1
        return events[0] if len(events) == 1 else b"".join(events)

    def _num_entries(self, pieces: Sequence[tuple[int, Piece]]) -> int:
        """Logprobs that the events of these pieces tell; the first event of a choice may tell its prompt's."""
        count = sum([len(piece.entries) for _, piece in pieces])
        if self._answer.num_prompt_logprobs:
            for index, _ in pieces:
                if index not in self._begun:
                    self._begun.add(index)
                    count += self._answer.num_echoed(index)
        return count

    async def _write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})
        self._last_write = time.monotonic()

    def _told(self, error: Exception) -> ApiError:
        told = self._error_view(error)
        trace = None if isinstance(error, EngineError) else error
        logger.log(_level(told), "stream %s failed: %s", self._writer.id, error, exc_info=trace)
        self._metrics.error(told.status, request_id=self._writer.id)
        if self._trace is not None:
            self._trace.failed_with(told.status)
        return told

    async def _attend(self, receive: Receive, deadline: asyncio.Timeout) -> None:
        """Beside the pump: ends it when the client has gone, and breaks silence with comments."""
        gone = asyncio.create_task(client_gone(receive))
        try:
            while not gone.done():
                silent_s = time.monotonic() - self._last_write
                wait_s = max(self._keep_alive_s - silent_s, 0.001) if self._keep_alive_s > 0 else None
                await asyncio.wait({gone}, timeout=wait_s)
                if wait_s and not gone.done() and time.monotonic() - self._last_write >= self._keep_alive_s:
                    await self._write(self._writer.ping, more=True)
            deadline.reschedule(asyncio.get_running_loop().time())
        finally:
            gone.cancel()
