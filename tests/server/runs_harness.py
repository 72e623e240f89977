"""Responses that run, over a fake engine: an app that must be left clean, a client that can leave, and polls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI
from openai.types.responses import Response

from server.app import create_app
from server.response_runs import Runs
from server.settings import Settings
from tests.server.fake_engine import FakeEngine
from tests.server.harness import eventually
from tests.server.responses_harness import events_of
from tests.server.test_responses import PATH, text_of

LONG = "word " * 400
SLOW = {"pause_s": 0.005, "max_model_len": 1 << 14}  # longer than any test takes, unless it is hurried


@asynccontextmanager
async def served(engine: FakeEngine, **settings: Any) -> AsyncIterator[tuple[FastAPI, httpx.AsyncClient]]:
    """In the end nothing is left over: no task, no running response, nothing reserved."""
    tasks = asyncio.all_tasks()
    app = create_app(Settings(**settings), engine)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield app, client
    engine.pause_s = 0
    await eventually(lambda: asyncio.all_tasks() <= tasks)
    runs: Runs = app.state.response_runs
    assert len(runs) == 0
    assert runs.store.num_reserved == 0


class Connection:
    """One request spoken to an app by hand, so that the client can leave."""

    def __init__(
        self, app: FastAPI, method: str, path: str, body: dict[str, Any] | None = None, query: str = ""
    ) -> None:
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode() if body is not None else b""
        self.data = b""
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
            "headers": [(b"content-length", b"%d" % len(self._body or b""))], "client": ("test", 1),
            "server": ("test", 80),
        }  # fmt: skip
        self.task = asyncio.create_task(app(scope, self._receive, self._send))

    async def leave(self) -> None:
        self._gone.set()
        await self.task

    @property
    def events(self) -> list[dict[str, Any]]:
        """Those that came whole."""
        return events_of(self.data[: self.data.rfind(b"\n\n") + 2].decode())

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.data += message.get("body", b"")


async def running(app: FastAPI) -> str:
    """The id of the one response that runs, once there is one."""
    await eventually(lambda: len(getattr(app.state, "response_runs", ())))
    (id,) = app.state.response_runs._running
    return str(id)


async def said(client: httpx.AsyncClient, id: str, num_chars: int = 20) -> dict[str, Any]:
    """A running response, once it has said that much."""
    for _ in range(1000):
        response: dict[str, Any] = (await client.get(f"{PATH}/{id}")).json()
        if len(text_of(response)) >= num_chars:
            return response
        await asyncio.sleep(0.002)
    raise AssertionError(response)


async def ended(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    """A background response, polled until it has ended."""
    for _ in range(2000):
        answer = await client.get(f"{PATH}/{id}")
        assert answer.status_code == 200, answer.text
        response: dict[str, Any] = answer.json()
        Response.model_validate(response)
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.002)
    raise AssertionError(response)
