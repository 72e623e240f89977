"""Bodies of all requests together have a bound, and one client has half of it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from server import bodies, middleware
from server.bodies import BodyLimit
from server.keys import Account, load_keys

LARGE = 1 << 20
ALICE, BOB = load_keys(["sk-a", "sk-b"], None).accounts


class Holding:
    """An app that answers when it is told to."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.lengths.append(len((await receive())["body"]))
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


async def ask(layer: BodyLimit, num_bytes: int, account: Account | None = None) -> list[Message]:
    """The answer to a body that comes in pieces of 100,000 bytes."""
    sent: list[Message] = []
    left = num_bytes

    async def receive() -> Message:
        nonlocal left
        piece = b"x" * min(left, 100_000)
        left -= len(piece)
        return {"type": "http.request", "body": piece, "more_body": left > 0}

    async def send(message: Message) -> None:
        sent.append(message)

    state: dict[str, Any] = {} if account is None else {"account": account}
    scope = {"type": "http", "path": "/", "headers": [(b"transfer-encoding", b"chunked")], "state": state}
    await layer(scope, receive, send)
    return sent


def status_of(sent: list[Message]) -> int:
    return int(sent[0]["status"])


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Holding:
    monkeypatch.setattr(bodies, "NUM_LARGE", 4)
    monkeypatch.setattr(middleware, "LINGER_S", 0.05)
    return Holding()


async def begun(app: Holding, tasks: list[asyncio.Task[list[Message]]]) -> None:
    while len(app.lengths) < len(tasks):  # noqa: ASYNC110  # each has come to the app
        await asyncio.sleep(0.001)


async def test_large_bodies_of_one_client_leave_the_others_half_the_room(app: Holding) -> None:
    layer = BodyLimit(app, LARGE, 5)
    held = [asyncio.create_task(ask(layer, LARGE, ALICE)) for _ in range(2)]
    await begun(app, held)
    refused = await ask(layer, LARGE, ALICE)
    assert status_of(refused) == 429
    assert dict(refused[0]["headers"])[b"retry-after"] == b"1"
    assert json.loads(refused[1]["body"])["error"]["code"] == "rate_limit_exceeded"
    held.append(asyncio.create_task(ask(layer, bodies.SMALL_BODY, ALICE)))
    held += [asyncio.create_task(ask(layer, LARGE, BOB)) for _ in range(2)]
    await begun(app, held)
    assert status_of(await ask(layer, LARGE, BOB)) == 429
    app.may_answer.set()
    assert [status_of(sent) for sent in await asyncio.gather(*held)] == [200] * len(held)
    assert sorted(app.lengths) == [bodies.SMALL_BODY, *[LARGE] * 4]


async def test_a_body_gives_its_room_back_however_it_ends(app: Holding) -> None:
    layer = BodyLimit(app, LARGE, 5)
    app.may_answer.set()
    for _ in range(5):
        assert status_of(await ask(layer, LARGE)) == 200
        assert status_of(await ask(layer, 2 * LARGE)) == 413
    task = asyncio.create_task(ask(layer, LARGE))
    app.may_answer.clear()
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    app.may_answer.set()
    assert [status_of(sent) for sent in await asyncio.gather(*(ask(layer, LARGE) for _ in range(2)))] == [200, 200]
    assert layer._room._num_bytes == 0
    assert layer._room._held == {}
