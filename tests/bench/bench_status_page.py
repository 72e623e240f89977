"""What the status page costs: decode tokens per second with 0, 1 and 5 pages open, in turns.

    python -m tests.bench.bench_status_page [--watchers 0 1 5] [--rounds 4] [--streams 8] [--tokens 48] [--threads 1]

A real server with the demo model; this process is the clients and the pages. In each round every number of pages has
its turn, in an order that changes: the same streams once more, while the pages get their frames. Reported: tokens per
second between the first and the last token of a turn, CPU milliseconds of the server's process per token, and both as
ratios to the turn without pages of the same round, whose medians tell the cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import httpx

from tests.e2e.conftest import real_server

PROMPT = "The status page of a server shows"


class Turn(NamedTuple):
    tokens_per_s: float
    cpu_ms_per_token: float


async def watch(client: httpx.AsyncClient, frames: list[int], number: int) -> None:
    """One open page: reads its frames and throws them away."""
    async with client.stream("GET", "/dashboard/events") as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            frames[number] += line.startswith("data:")


@contextlib.asynccontextmanager
async def watched(client: httpx.AsyncClient, count: int) -> AsyncIterator[list[int]]:
    """`count` pages are open and have their first frame; gives the frames that each has got."""
    frames = [0] * count
    tasks = [asyncio.create_task(watch(client, frames, number)) for number in range(count)]
    try:
        while not all(frames):
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.02)
        yield frames
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def stream(client: httpx.AsyncClient, num_tokens: int, times: list[float]) -> None:
    """One answer; `times` gets when each of its events came."""
    body = {"prompt": PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith('data: {"'):
                times.append(time.monotonic())


async def cpu_s(client: httpx.AsyncClient) -> float:
    text = (await client.get("/metrics")).text
    found = re.search(r"^process_cpu_seconds_total (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def turn(client: httpx.AsyncClient, num_watchers: int, num_streams: int, num_tokens: int) -> Turn:
    async with watched(client, num_watchers) as frames:
        before, seen = await cpu_s(client), list(frames)
        times: list[float] = []
        await asyncio.gather(*(stream(client, num_tokens, times) for _ in range(num_streams)))
        used_s = await cpu_s(client) - before
        assert all(now > then for now, then in zip(frames, seen, strict=True)), "every page got frames"
    total = num_streams * num_tokens
    return Turn(total / (max(times) - min(times)), 1000 * used_s / total)


async def measure(url: str, arguments: argparse.Namespace) -> dict[int, list[Turn]]:
    turns: dict[int, list[Turn]] = {count: [] for count in arguments.watchers}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False, limits=limits) as client:
        await turn(client, 0, arguments.streams, arguments.tokens)  # the first is slower than all others
        for number in range(arguments.rounds):
            start = number % len(arguments.watchers)
            for count in [*arguments.watchers[start:], *arguments.watchers[:start]]:
                turns[count].append(await turn(client, count, arguments.streams, arguments.tokens))
    return turns


def report(turns: dict[int, list[Turn]]) -> None:
    base = min(turns)
    print(f"{'pages':>5} {'tokens/s':>9} {'ratio':>7} {'lowest':>7} {'CPU ms/token':>13} {'ratio':>7}")
    for count, own in turns.items():
        speeds = [each.tokens_per_s / other.tokens_per_s for each, other in zip(own, turns[base], strict=True)]
        costs = [each.cpu_ms_per_token / other.cpu_ms_per_token for each, other in zip(own, turns[base], strict=True)]
        middle = Turn(*(statistics.median(column) for column in zip(*own, strict=True)))
        print(
            f"{count:5d} {middle.tokens_per_s:9.1f} {statistics.median(speeds):7.3f} {min(speeds):7.3f} "
            f"{middle.cpu_ms_per_token:13.3f} {statistics.median(costs):7.3f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--watchers", type=int, nargs="+", default=[0, 1, 5])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--num-threads", str(arguments.threads), "--log-level", "warning")
        with real_server(Path(folder) / "log", *flags) as server:
            report(asyncio.run(measure(server.url, arguments)))


if __name__ == "__main__":
    main()
