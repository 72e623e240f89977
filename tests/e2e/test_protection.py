"""Keys, shares and time limits with the demo model, over HTTP: one client's queue, another's single request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from server.digest import digest_of
from tests.server.process import ServerProcess

pytestmark = pytest.mark.model

KEYS = {"greedy": "sk-greedy", "modest": "sk-modest"}
NUM_QUEUED = 60
TOKENS = 24


def key_file(folder: Path) -> str:
    tables = [f'[{name}]\nsha256 = "{digest_of(key.encode()).hex()}"' for name, key in KEYS.items()]
    boss = f'[boss]\nsha256 = "{digest_of(b"sk-boss").hex()}"\nscopes = ["metrics", "admin"]'
    path = folder / "keys.toml"
    path.write_text("\n".join([*tables, boss]))
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(client: httpx.AsyncClient, key: str, prompt: str, **more: Any) -> tuple[httpx.Response, float]:
    """The answer, and when it came."""
    body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0} | more
    response = await client.post("/v1/completions", json=body, headers=bearer(key))
    return response, time.monotonic()


async def metric(client: httpx.AsyncClient, name: str) -> float:
    text = (await client.get("/metrics", headers=bearer("sk-boss"))).text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(f"pagemill_{name} ")))


async def test_one_clients_queue_does_not_hold_up_another_and_times_and_blocks_are_given_back(
    start: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    server = await asyncio.to_thread(start, "--api-key-file", key_file(tmp_path), "--max-num-seqs", "4")
    async with httpx.AsyncClient(base_url=server.url, timeout=300, trust_env=False) as client:
        await _shares(client)
        await _lapse(client)
        await _caches(client)


async def _shares(client: httpx.AsyncClient) -> None:
    queued = [asyncio.create_task(ask(client, "sk-greedy", f"Request {i} is")) for i in range(NUM_QUEUED)]
    for _ in range(1000):
        if await metric(client, "num_requests_waiting") >= NUM_QUEUED / 2:
            break
        await asyncio.sleep(0.01)
    answer, ended_s = await ask(client, "sk-modest", "One request is")
    assert answer.json()["usage"]["completion_tokens"] == TOKENS
    answers = await asyncio.gather(*queued)
    ends = sorted(end for _, end in answers)
    usage = [told.json()["usage"] for told, _ in answers]
    assert await metric(client, 'client_tokens_total{client="greedy"}') == sum(each["total_tokens"] for each in usage)
    usage.append(answer.json()["usage"])
    assert await metric(client, "generation_tokens_total") == sum(each["completion_tokens"] for each in usage)
    assert await metric(client, "prompt_tokens_total") == sum(each["prompt_tokens"] for each in usage)
    num_before = sum(end < ended_s for end in ends)
    assert num_before <= NUM_QUEUED / 2, "it came last and was among the first: 4 rows, a turn each"
    assert ended_s < median(ends)


async def _lapse(client: httpx.AsyncClient) -> None:
    answer, _ = await ask(client, "sk-modest", "A story:", max_tokens=1500, timeout=0.4)
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "timeout")
    streamed, _ = await ask(client, "sk-modest", "A story:", max_tokens=1500, timeout=0.4, stream=True)
    assert '"code":"timeout"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")
    for _ in range(200):
        if await metric(client, "num_requests_running") == 0:
            break
        await asyncio.sleep(0.02)
    assert await metric(client, "kv_cache_usage_perc") == 0


async def _caches(client: httpx.AsyncClient) -> None:
    """A prompt of one client tells another nothing by how fast it is answered."""
    prompt = "The quick brown fox jumps over the lazy dog. " * 8

    async def cached(key: str) -> int:
        answer, _ = await ask(client, key, prompt, max_tokens=1)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert await cached("sk-greedy") == 0
    assert await cached("sk-greedy") > 0
    assert await cached("sk-modest") == 0
    assert (await client.post("/admin/reset_prefix_cache", headers=bearer("sk-boss"))).status_code == 202
    assert await cached("sk-greedy") == 0
