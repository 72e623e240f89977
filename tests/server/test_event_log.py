"""The log of a response's events, and the stream that tells it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from server.event_log import END, MAX_WRITE, EventLog, LogStream
from server.metrics import Metrics
from tests.server.harness import eventually


def event(number: int, size: int = 20) -> bytes:
    return b"event: e\ndata: %d %b\n\n" % (number, b"x" * size)


def read_all(log: EventLog, offset: int = 0) -> bytes:
    told = b""
    while part := log.read(offset + len(told)):
        told += part
    return told


@pytest.mark.parametrize("seed", range(5))
def test_it_tells_what_follows_any_event(seed: int) -> None:
    rng = random.Random(seed)
    events = [event(number, rng.randrange(3000)) for number in range(100)]
    log, left = EventLog(), list(events)
    while left:
        count = rng.randint(0, min(6, len(left)))
        log.append(b"".join(left[:count]))
        del left[:count]
        log.publish(ended=not left)
    for number in range(len(events)):
        offset = log.offset_behind(number)
        assert offset is not None
        assert read_all(log, offset) == b"".join(events[number + 1 :])
    assert log.offset_behind(len(events)) is None
    assert read_all(log) == b"".join(events)
    assert log.num_bytes > sum(map(len, events))


def test_nothing_is_told_before_it_is_published() -> None:
    log = EventLog()
    log.append(event(0))
    assert log.read(0) == b""
    log.publish()
    log.append(event(1))
    assert log.read(0) == event(0)


def test_what_is_dropped_is_gone() -> None:
    log = EventLog()
    log.append(event(0, 100_000))
    log.publish()
    log.drop()
    log.append(event(1))
    assert (log.ended, log.dropped, log.read(0), log.offset_behind(0)) == (True, True, b"", None)
    assert log.num_bytes < 1000


class Reader:
    """Reads a stream of `log`; its client may leave."""

    def __init__(self, log: EventLog, offset: int = 0, keep_alive_s: float = 0) -> None:
        self.metrics = Metrics()
        self.messages: list[Any] = []
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.gone = asyncio.Event()
        stream = LogStream(log, offset, metrics=self.metrics, keep_alive_s=keep_alive_s)
        self.task = asyncio.create_task(stream({"type": "http"}, self._receive, self._send))

    @property
    def data(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.may_read.wait()
        self.messages.append(message)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_readers_follow() -> None:
    log = EventLog()
    first = Reader(log)
    for number in range(3):
        log.append(event(number))
        log.publish()
        await settled()
        assert first.data == b"".join(map(event, range(number + 1)))
    offset = log.offset_behind(1)
    assert offset is not None
    second = Reader(log, offset)
    log.append(event(3))
    log.publish(ended=True)
    await asyncio.gather(first.task, second.task)
    assert first.data == b"".join(map(event, range(4)))
    assert second.data == event(2) + event(3)
    for reader in (first, second):
        assert [message["more_body"] for message in reader.messages[1:]][-2:] == [True, False]
        assert b"client_disconnects_total 0.0" in reader.metrics.render()


async def test_one_that_reads_slowly_gets_larger_pieces() -> None:
    log = EventLog()
    reader = Reader(log)
    reader.may_read.clear()
    for number in range(5000):
        log.append(event(number))
        log.publish(ended=number == 4999)
    await settled()
    reader.may_read.set()
    await reader.task
    assert reader.data == b"".join(map(event, range(5000)))
    assert len(reader.messages) < 2 + len(reader.data) / MAX_WRITE + 1


async def test_silence_is_broken() -> None:
    reader = Reader(EventLog(), keep_alive_s=0.001)
    await eventually(lambda: reader.data.count(b": ping\n\n") > 2)
    reader.gone.set()
    await reader.task


@pytest.mark.parametrize("stuck", [False, True])
async def test_one_that_leaves(stuck: bool) -> None:
    reader = Reader(EventLog())
    if stuck:
        reader.may_read.clear()
    await settled()
    reader.gone.set()
    await reader.task
    assert b"client_disconnects_total 1.0" in reader.metrics.render()


@pytest.mark.parametrize("num_told", [0, 1, 3])
@pytest.mark.parametrize("ended", [False, True])
async def test_readers_of_what_is_dropped_are_told(ended: bool, num_told: int) -> None:
    """After whole events: half of one could not be taken back."""
    log = EventLog()
    log.append(event(0))
    log.publish()
    offset = log.offset_behind(0)
    assert offset is not None
    events = [event(number, MAX_WRITE // 2) for number in range(1, 8)]
    reader = Reader(log, offset)
    for count, sent in enumerate(events):
        if count == num_told:
            await settled()
            reader.may_read.clear()
        log.append(sent)
        log.publish(ended=ended and count == len(events) - 1)
        if count < num_told:
            await settled()
    await settled()
    log.drop()
    reader.may_read.set()
    await reader.task
    *told, last, nothing = reader.data.split(END)
    assert nothing == b""
    assert [part + END for part in told] == events[: len(told)]
    assert num_told <= len(told) < len(events)
    name, data = last.split(b"\n")
    assert name == b"event: error"
    error = json.loads(data.removeprefix(b"data: "))
    assert (error["type"], error["sequence_number"]) == ("error", 1 + len(told))
    assert error["error"]["message"] == error["message"]
    assert reader.messages[-1]["more_body"] is False


@pytest.mark.parametrize("seed", range(5))
def test_a_write_takes_whole_events(seed: int) -> None:
    rng = random.Random(seed)
    log = EventLog()
    for number in range(50):
        log.append(event(number, rng.choice([10, 5000, MAX_WRITE, 2 * MAX_WRITE])))
    log.publish()
    offset, number = 0, 0
    while part := log.read(offset):
        assert log.number_at(offset) == number
        assert part.endswith(END)
        assert len(part) <= MAX_WRITE or part.count(END) == 1
        offset, number = offset + len(part), number + part.count(END)
    assert number == 50
