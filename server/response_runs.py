"""Responses that run: found by their id, looked at, cancelled, and, in the background, made without a connection.

| who makes it         | what a client that leaves ends  | its events              |
|----------------------|---------------------------------|-------------------------|
| its own connection   | the response; nothing is kept   | go to that client alone |
| a task of its own    | nothing                         | are kept for all        |

A response is here from the engine's admission until it has ended; it enters the store before its end is told, so that
whoever hears of it finds it. What a background response holds while it runs is reserved in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from server.assemble import Answer
from server.event_log import EventLog
from server.front import Front
from server.keys import Account
from server.protocol.errors import RATE_LIMITED, ApiError, to_api_error
from server.protocol.responses_writer import ResponsesWriter
from server.response_store import ENTRY_BYTES, Item, Kept, KeptItem, ResponseStore, Shelf, StoredResponse

logger = logging.getLogger("pagemill.server")

RESERVE = 16 << 10  # bytes of events that are reserved at a time
BUSY = {"Retry-After": "5"}


class Runs:
    """One per application; on the event loop, except for `get`."""

    def __init__(self, store: ResponseStore, max_background: int) -> None:
        self.store = store
        self._max_background = max_background
        self._num_background: Counter[str] = Counter()  # by owner
        self._running: dict[str, Run] = {}

    def __len__(self) -> int:
        return len(self._running)

    def get(self, id: str, owner: str) -> Run | None:
        """None also for another owner's."""
        run = self._running.get(id)
        return run if run is not None and run.shelf.owner == owner else None

    def open(
        self, owner: str, given: Kept, previous: StoredResponse | None, *, background: bool, streamed: bool
    ) -> Run:  # fmt: skip
        """A response to come, which `Run.close` has to end. given, previous: as in `ResponseStore.put`.

        Raises ApiError 429 for more background responses than there may be, or than one of several owners may have:
        half of them."""
        if not background:
            return Run(self, owner, given, previous)
        num_bytes = given.num_bytes + ENTRY_BYTES
        running, own = self._num_background.total(), self._num_background[owner]
        if running >= self._max_background or (owner and own >= self._max_background // 2):
            told = f"{own} background responses of yours are running, and {running} in all: no more may."
            raise ApiError(429, told, code=RATE_LIMITED, headers=BUSY)
        num_reserved = num_bytes + (RESERVE if streamed else 0)
        if not self.store.reserve(num_reserved, owner):
            told = "The background responses that are running take all the memory there is for responses."
            raise ApiError(429, told, code=RATE_LIMITED, headers=BUSY)
        self._num_background[owner] += 1
        log = EventLog() if streamed else None
        return Run(self, owner, given, previous, num_bytes=num_bytes, num_reserved=num_reserved, log=log)

    def enter(self, run: Run) -> None:
        self._running[run.writer.id] = run

    def leave(self, run: Run) -> None:
        if self._running.get(run.writer.id) is run:
            del self._running[run.writer.id]

    def background_ended(self, owner: str) -> None:
        self._num_background[owner] -= 1


class Run:
    """One response that runs. num_bytes: what it holds beside its events; num_reserved: for these and events, if it
    is a background response. log: for events that are kept."""

    writer: ResponsesWriter
    answer: Answer

    def __init__(
        self,
        runs: Runs,
        owner: str,
        given: Kept,
        previous: StoredResponse | None,
        *,
        num_bytes: int = 0,
        num_reserved: int | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.shelf = Shelf(runs.store, owner)
        self.log = log
        self.is_background = num_reserved is not None
        self._runs = runs
        self._given = given
        self._previous = previous
        self._num_bytes = num_bytes
        self._num_reserved = num_reserved or 0
        self._is_begun = False
        self._is_forgotten = False
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()  # its last word is known
        self._task: asyncio.Task[None] | None = None
        self._account: Account | None = None

    # -- made ------------------------------------------------------------------------------------------------------

    def begin(self, writer: ResponsesWriter, answer: Answer) -> None:
        """The engine has admitted it: from now on it can be found."""
        self.writer, self.answer = writer, answer
        self._is_begun = True
        self._runs.enter(self)

    async def tell(self, front: Front, receive: Receive, *, streamed: bool) -> Response:
        """The answer to the connection that it belongs to."""
        telling = front.tell(self.answer, self.writer, receive, streamed=streamed)
        if streamed:
            return Attended(await telling, self)
        try:
            return await telling
        finally:
            self.close()

    def start(self, front: Front, facts: dict[str, object], account: Account | None) -> bytes:
        """Make it in the background; returns the response as it begins, JSON. facts: for the line that is logged at
        its end; account: of the key that asks, whose request this is until then."""
        if account is not None:
            account.num_requests += 1
            self._account = account
        begun = self.writer.snapshot(self.answer.usage())
        self._task = self._loop.create_task(self._make(front, facts))
        return begun

    async def _make(self, front: Front, facts: dict[str, object]) -> None:
        writer = self.writer
        try:
            response = await front.tell(self.answer, writer, _never, streamed=self.log is not None)
            if self.log is not None:
                await response({"type": "http"}, _never, self._send)
        except Exception as error:  # nobody waits for it who could be told otherwise
            told = to_api_error(error)
            front.metrics.error(told.status)
            if not isinstance(error, ApiError):
                logger.exception("background response %s failed", writer.id)
            if writer.final is None:
                self._give_up(writer.fail(told))
        finally:
            self.answer.close()
            self.close()
            status = writer.final["status"] if writer.final is not None else "ended by the server"
            fields = {"id": writer.id, "status": status, **facts}
            logger.info("background response", extra={"fields": fields})

    def _give_up(self, response: Item) -> None:
        """What the stream did not bring to its end is known all the same."""
        if self.log is not None:
            self.log.drop()
            self._store(response)

    async def _send(self, message: Message) -> None:
        """The stream's way into the log."""
        body = message.get("body", b"")
        assert self.log is not None
        if message["type"] != "http.response.body" or body == self.writer.ping:
            return
        self.log.append(body)
        self._make_room()
        is_last = not message.get("more_body", False)
        self.log.publish(ended=is_last)
        if is_last and self.writer.final is not None:
            self._store(self.writer.final)  # no reader has had its turn since

    def _make_room(self) -> None:
        """Events that find no room are given up; the response goes on."""
        assert self.log is not None
        wanted = self._num_bytes + self.log.num_bytes
        if self.log.dropped or wanted <= self._num_reserved:
            return
        if self._runs.store.reserve(more := wanted - self._num_reserved + RESERVE, self.shelf.owner):
            self._num_reserved += more
        else:
            logger.warning("no memory for the events of %s", self.writer.id)
            self.log.drop()

    def keep(self, response: Item) -> None:
        """The writer's last word; in any thread."""
        if self.log is None:
            self._store(response)
        self._loop.call_soon_threadsafe(self._ended.set)

    def _store(self, response: Item) -> None:
        if self._is_forgotten:
            return
        self._release()
        events = self.log if self.log is not None and not self.log.dropped else None
        put = self.shelf.put
        if put(response, self._given, self._previous, events):
            return
        is_kept = events is not None and put(response, self._given, self._previous)
        if self.is_background and not is_kept:  # who polls must come to an end
            error = {"code": "server_error", "message": "The response is larger than what this server keeps."}
            # whoever looks now sees it too
            self.writer.final = response | {"status": "failed", "error": error, "output": []}
            put(self.writer.final, Kept())

    def _release(self) -> None:
        num_reserved, self._num_reserved = self._num_reserved, 0
        self._runs.store.release(num_reserved, self.shelf.owner)

    def close(self) -> None:
        """It has ended, or never came to be. May be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        self._release()
        self._ended.set()
        if self._is_begun:
            self._runs.leave(self)
        if self.log is not None and not self.log.ended:
            self.log.drop()
        if self.is_background:
            self._runs.background_ended(self.shelf.owner)
            if self._account is not None:
                self._account.leave()

    # -- looked at -------------------------------------------------------------------------------------------------

    async def body(self) -> bytes:
        """The response as it is now, JSON."""
        return await asyncio.to_thread(self.writer.snapshot, self.answer.usage())

    def input_items(self) -> list[KeptItem]:
        """As StoredResponse's."""
        return [*(self._previous.history() if self._previous is not None else ()), *self._given]

    async def cancel(self) -> bytes | None:
        """The response, cancelled unless it had all said; None if it failed without a trace. The engine is told at
        once."""
        if await asyncio.to_thread(self.writer.cancel):
            self.answer.close()
            return await self.body()
        await self._ended.wait()
        return orjson.dumps(self.writer.final) if self.writer.final is not None else None

    async def forget(self) -> None:
        """Nobody shall find it any more."""
        self._is_forgotten = True
        self._runs.leave(self)
        if not await asyncio.to_thread(self.writer.cancel):
            self.shelf.delete(self.writer.id)
        self.answer.close()


class Attended(Response):
    """The stream of a response that is known while it runs."""

    def __init__(self, stream: Response, run: Run) -> None:
        super().__init__()
        self._stream = stream
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._stream(scope, receive, send)
        finally:
            self._run.close()


async def _never() -> dict[str, Any]:
    """A client that neither sends nor leaves."""
    await asyncio.Event().wait()
    raise AssertionError
