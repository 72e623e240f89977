"""The app over a fake engine, and a reader of event streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from server.app import create_app
from server.settings import Settings
from tests.server.fake_engine import FakeEngine


@asynccontextmanager
async def client_of(engine: FakeEngine, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(Settings(**settings), engine)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


class Events:
    """What one event stream held."""

    def __init__(self, body: str) -> None:
        blocks = [block for block in body.split("\n\n") if block]
        data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
        assert data[-1] == "[DONE]"
        assert data.count("[DONE]") == 1
        self.chunks: list[dict[str, Any]] = [json.loads(item) for item in data[:-1]]
        self.usage = self.chunks[-1].get("usage") if self.chunks else None

    def choices(self, index: int) -> list[dict[str, Any]]:
        return [c for chunk in self.chunks for c in chunk.get("choices", ()) if c["index"] == index]

    def text(self, index: int = 0) -> str:
        parts = [c["text"] if "text" in c else c["delta"].get("content") for c in self.choices(index)]
        return "".join(part or "" for part in parts)

    def finish(self, index: int = 0) -> str:
        reasons = [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]
        assert len(reasons) == 1
        return str(reasons[0])


async def stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> Events:
    response = await client.post(path, json=body | {"stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return Events(response.text)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return dict(error)


async def eventually(condition: Callable[[], object]) -> None:
    """Returns once `condition()` holds; fails after two seconds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("it never came to be")
