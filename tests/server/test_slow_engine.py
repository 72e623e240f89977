"""No silent connections: an engine that takes its time before the first token and between all others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import openai
import pytest

from server import front
from tests.server.harness import Events, eventually
from tests.server.process import stub_server
from tests.server.stub_engine import StubEngine
from tests.server.test_sse import Client

BODIES = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2, "stream": True},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "stream": True},
}


@pytest.mark.parametrize("path", BODIES)
async def test_the_head_goes_out_on_admission_and_comments_break_every_silence(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.front.KEEP_ALIVE_S", 0.05)
    engine = StubEngine(ready=True, interval_s=0.3)
    client = Client(engine, path, BODIES[path])  # type: ignore[arg-type]  # an engine all the same
    told: list[object] = []
    engine.add_listener(told.append)
    task = asyncio.create_task(client.run())
    await eventually(lambda: client.sent)
    assert client.sent[0]["type"] == "http.response.start"
    assert client.sent[0]["status"] == 200
    assert told == []
    await eventually(lambda: client.bodies)
    assert told == []
    await task
    bodies = client.bodies
    first = next(k for k, body in enumerate(bodies) if body.startswith(b"data: "))
    second = next(k for k, body in enumerate(bodies) if k > first and body.startswith(b"data: "))
    assert bodies[:first] == [b": ping\n\n"] * first
    assert first >= 2
    assert second - first >= 3
    assert Events(b"".join(bodies).decode()).text() == "pa"


def test_comments_are_on_by_default() -> None:
    assert front.KEEP_ALIVE_S == 10


def test_the_sdk_waits_through_the_silence(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--interval", "0.4", "--ping", "0.05") as server:
        server.wait_for("ready")
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as sdk:
            chunks = list(
                sdk.chat.completions.create(
                    model="stub", messages=[{"role": "user", "content": "a"}], max_tokens=3, stream=True
                )
            )
        body = BODIES["/v1/chat/completions"]
        with httpx.stream("POST", server.url + "/v1/chat/completions", json=body, trust_env=False) as response:
            lines = list(filter(None, response.iter_lines()))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "pag"
    assert lines[0] == ": ping"
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
