"""What an operator gets: keys, metrics that come back to zero, a burst that is answered, a clean end."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import KEY
from tests.server.process import ROOT, ServerProcess

pytestmark = pytest.mark.model

Start = Callable[..., ServerProcess]


def metric(text: str, name: str) -> float:
    (value,) = re.findall(rf"^pagemill_{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(value)


def client_of(server: ServerProcess, **options: Any) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False, limits=limits, **options)


async def stream(client: httpx.AsyncClient, **body: Any) -> list[str]:
    asked = {"prompt": "Once upon a time", "max_tokens": 1000, "stream": True, "ignore_eos": True} | body
    async with client.stream("POST", "/v1/completions", json=asked) as response:
        assert response.status_code == 200
        return [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]


async def quiet(client: httpx.AsyncClient, within_s: float = 10) -> str:
    """/metrics once nothing runs, waits or holds a block; no further request is needed for that."""
    until = time.monotonic() + within_s
    while True:
        text = (await client.get("/metrics")).text
        left = [metric(text, n) for n in ("num_requests_running", "num_requests_waiting", 'kv_blocks{state="used"}')]
        if not any(left):
            return text
        assert time.monotonic() < until, f"running, waiting, used blocks: {left}"
        await asyncio.sleep(0.05)


async def test_clients_that_leave_give_back_their_blocks(server: ServerProcess) -> None:
    async with client_of(server) as client:
        before = metric(await quiet(client), "client_disconnects_total")
        for wait_s in (0.0, 0.15, 0.6):
            tasks = [asyncio.create_task(stream(client, prompt=f"Story {i}", temperature=0.9)) for i in range(12)]
            plain = {"prompt": "Long", "max_tokens": 1500, "ignore_eos": True}
            tasks += [asyncio.create_task(client.post("/v1/completions", json=plain)) for _ in range(2)]
            await asyncio.sleep(wait_s + 0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            after = await quiet(client)
        assert metric(after, "client_disconnects_total") > before
        assert (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).status_code == 200


async def test_a_burst_is_answered_and_health_stays_prompt(server: ServerProcess) -> None:
    async with client_of(server) as client:

        async def one(index: int) -> int:
            body = {"prompt": f"Item {index}:", "max_tokens": 4 + index % 7, "temperature": 0}
            return (await client.post("/v1/completions", json=body)).status_code

        burst = asyncio.gather(*(one(index) for index in range(100)))
        slowest = 0.0
        while not burst.done():
            began = time.monotonic()
            assert (await client.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0.05)
        assert set(await burst) == {200}
        assert slowest < 5
        await quiet(client)


async def test_token_counters_rise_by_what_usage_says(server: ServerProcess) -> None:
    async with client_of(server) as client:
        before = metric(await quiet(client), "generation_tokens_total")
        answer = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, "n": 2})
        after = metric(await quiet(client), "generation_tokens_total")
        assert after - before == answer.json()["usage"]["completion_tokens"]


def test_a_step_tells_its_parts(http: httpx.Client) -> None:
    """Forward and sampling are parts of execute, which is part of the step."""
    http.post("/v1/completions", json={"prompt": "One two three", "max_tokens": 8}).raise_for_status()
    text = http.get("/metrics").text
    sums = dict(re.findall(r"^pagemill_step_(?:(\w+)_)?seconds_sum (\S+)$", text, re.MULTILINE))
    counts = dict(re.findall(r"^pagemill_step_(?:(\w+)_)?seconds_count (\S+)$", text, re.MULTILINE))
    seconds = {name: float(value) for name, value in sums.items()}
    assert set(seconds) == {"", "schedule", "execute", "forward", "sampling", "update", "hand_over"}
    assert min(seconds.values()) > 0
    assert seconds["forward"] + seconds["sampling"] < seconds["execute"] < seconds[""]
    assert counts["forward"] == counts["execute"] == counts["hand_over"]


async def test_version_and_models_tell_what_is_served(server: ServerProcess) -> None:
    async with client_of(server) as client:
        facts = (await client.get("/version")).json()
        assert facts["system_fingerprint"]
        assert facts["numeric_profile"]
        answer = (await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1})).json()
        assert answer["system_fingerprint"] == facts["system_fingerprint"]
        model = (await client.get("/v1/models")).json()["data"][0]
        assert model["id"] == answer["model"]


async def test_a_key_guards_everything_and_sigterm_drains(start: Start) -> None:
    server = start("--grace-period", "300", PAGEMILL_API_KEY=KEY)
    async with client_of(server) as stranger:
        for path in ("/v1/completions", "//v1/completions", "/v1/models", "/tokenize", "/version", "/nothing"):
            assert (await stranger.send(stranger.build_request("POST", server.url + path))).status_code == 401
        assert (await stranger.get("/health")).status_code == 200
    async with client_of(server, headers={"Authorization": f"Bearer {KEY}"}) as client:
        streamed = asyncio.create_task(stream(client, max_tokens=150))
        plain = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 100}))
        await asyncio.sleep(0.5)
        server.signal()
        await asyncio.sleep(0.1)
        refused = await client.post("/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 503
        assert refused.headers["connection"] == "close"
        events = await streamed
        assert events[-1] == "[DONE]"
        assert '"finish_reason":"length"' in events[-2]
        assert (await plain).status_code == 200
    assert await asyncio.to_thread(server.wait) == 0
    assert KEY not in server.log
    assert "Once upon a time" not in server.log


def test_a_taken_port_is_one_sentence(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "server", "serve", "--port", str(server.port)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == f"pagemill: Cannot listen on 127.0.0.1:{server.port}: address already in use."


def test_check_prints_the_plan() -> None:
    flags = ["--kv-cache-memory", "192MiB", "--dtype", "float32", "--lengths", "100,2048"]
    command = [sys.executable, "-m", "server", "check", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^(.+?)  +(.+)$", done.stdout, re.MULTILINE))
    per_token = int(rows["KV per token"].split()[0])
    blocks = int(rows["blocks"].split()[0])
    assert blocks == 192 * 2**20 // (per_token * 16)
    assert rows["at 100 tokens"] == f"{blocks // 7} sequences at once"
    assert rows["at 2048 tokens"] == f"{blocks // 128} sequences at once"
