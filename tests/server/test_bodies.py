"""Bodies of all requests together have a bound, and one client has half of it."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from server import bodies, body_log, middleware
from server.app import create_app
from server.bodies import BodyLimit
from server.keys import Account
from server.settings import Settings
from tests.server.keys import load_keys
from tests.server.stub_engine import StubEngine

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


async def ask(
    layer: BodyLimit, num_bytes: int, account: Account | None = None, *, stuck: bool = False
) -> list[Message]:
    """The answer to a body that comes in pieces of 100,000 bytes. stuck: the last one never comes."""
    sent: list[Message] = []
    left = num_bytes

    async def receive() -> Message:
        nonlocal left
        if stuck and left <= 100_000:
            await asyncio.Event().wait()
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


@pytest.mark.parametrize("asked", [False, True])
async def test_bodies_are_logged_only_where_that_is_asked_for_and_without_keys(
    asked: bool, caplog: pytest.LogCaptureFixture
) -> None:
    key, other = "sk-our-own-key", "sk-of-a-tool"
    tool = {
        "type": "mcp",
        "headers": {"Authorization": f"Bearer {other}"},
        "server": {"api_key": [1], "apiKey": other},
    }
    body = {"prompt": f"my {key} line\nbreak", "max_tokens": 1, "tools": [tool], "rest": "z" * 10_000}
    settings = Settings(api_key=(key,), enable_log_requests=asked, max_log_len=400)
    app = create_app(settings, StubEngine(ready=True))
    with caplog.at_level(logging.INFO):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            headers = {"Authorization": f"Bearer {key}"}
            answer = await client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert (await client.post("/v1/completions", json=body)).status_code == 401
            too_large = {"prompt": "break" * 50, "api_key": "y" * (1 << 24)}
            assert (await client.post("/v1/completions", json=too_large, headers=headers)).status_code == 413
    lines = [record.fields for record in caplog.records if record.message == "request body"]  # type: ignore[attr-defined]
    assert ("break" in str([vars(record) for record in caplog.records])) is asked
    assert len(lines) == asked
    for line in lines:
        assert line["body"].startswith('{"prompt":"my [hidden] line\\nbreak"')
        assert len(line["body"]) == 400
        assert not any(secret in line["body"] for secret in (key, other))
        ended = [record.fields["id"] for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
        assert line["id"] == answer.headers["x-request-id"] == ended[0]


@pytest.mark.parametrize("num_chars", range(1, 200))
def test_a_key_is_not_half_told_where_the_body_is_cut(num_chars: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    scope = {"headers": [(b"x-api-key", b"sk-our-own-key")], "state": {"let_in": True}}
    body_log.tell(scope, b'{"a": "' + b"x" * 70 + b' sk-our-own-key", "password": "se\\"cret-word', num_chars)
    told = caplog.text
    assert not any(part in told for part in ("sk-o", "cret", "own"))
    caplog.clear()
    hidden = b'"secret": "' + b"y" * (4 * num_chars) + b'"'  # what is left out brings the end of what was read near
    body_log.tell(scope, b"{" + hidden + b"x" * 480 + b"sk-our-own-key" + b"z" * 9000, num_chars)
    assert not any(part in caplog.text for part in ("sk-o", "y" * 8))


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
    task = asyncio.create_task(ask(layer, LARGE, stuck=True))
    await asyncio.sleep(0.01)
    assert layer._room._num_bytes > 0, "it waits for the rest"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert layer._room._num_bytes == 0
    assert layer._room._held == {}
