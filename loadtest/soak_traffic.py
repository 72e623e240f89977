"""The clients of a soak: those who wait for their answer, those who leave, those who ask nonsense."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any

from loadtest.client import Target, send
from loadtest.prompts import Words
from loadtest.record import RequestRecord, decode
from loadtest.soak_checks import Tally
from loadtest.transport import Transport, TransportError
from loadtest.workloads import PlannedRequest

BAD_BODIES: tuple[tuple[str, Any], ...] = (  # each must get a 4xx
    ("/v1/completions", b'{"model": '),
    ("/v1/completions", b"[]"),
    ("/v1/completions", {"prompt": "hi", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 10_000_000}),
    ("/v1/completions", {"prompt": [1, "two"], "max_tokens": 4}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "temperature": "hot"}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 4, "n": -3}),
    ("/v1/completions", {"max_tokens": 4}),
    ("/v1/chat/completions", {"messages": "hello", "max_tokens": 4}),
    ("/v1/chat/completions", {"messages": [], "max_tokens": 4}),
)


class Traffic:
    """Counts into `tally`. random: one for all clients, so that a seed gives one traffic (but not one timing)."""

    def __init__(self, transport: Transport, target: Target, tally: Tally, random: Random) -> None:
        self.random = random
        self._transport = transport
        self._target = target
        self._tally = tally
        self._prompts = [Words().draw(random, 96) for _ in range(4)]  # beginnings that many requests share

    async def good(self, *, short: bool = False) -> None:
        """A request that must be answered in full."""
        target, request = self._any_request(short)
        record = RequestRecord(0, planned_tokens=request.max_tokens, n=request.n, streamed=target.stream)
        await send(self._transport, target, target.body(request), record)
        decode(record)
        tally = self._tally
        if record.status == 429:  # a full queue is an answer
            tally.statuses[429] += 1
        elif record.error:
            tally.faults[record.error] += 1
            if record.status not in (0, 200):
                tally.statuses[record.status] += 1
            self._may_have_counted(request)
        else:
            tally.completed += 1
            tally.completed_choices += request.n
            tally.prompt_tokens += record.prompt_tokens
            tally.output_tokens += record.output_tokens
            if target.ignore_eos and record.output_tokens != request.max_tokens * request.n:
                tally.faults["answer of another length"] += 1

    async def leaving(self) -> None:
        """A client that goes away before its answer is whole."""
        target, request = self._any_request(short=False)
        request = replace(request, max_tokens=200)
        record = RequestRecord(0, n=request.n, streamed=target.stream)
        task = asyncio.create_task(send(self._transport, target, target.body(request), record))
        await asyncio.sleep(self.random.uniform(0.0, 0.4))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        self._tally.disconnected += 1
        self._may_have_counted(request)

    async def bad(self) -> None:
        """Nonsense, which must be refused."""
        path, body = self.random.choice(BAD_BODIES)
        if isinstance(body, dict):
            body = json.dumps({"model": self._target.model, **body}).encode()
        record = RequestRecord(0, streamed=False)
        try:
            async with asyncio.timeout(30.0):
                await self._transport.post(path, body, record)
        except (TransportError, TimeoutError) as error:
            self._tally.faults[f"bad request: {error or 'timeout'}"] += 1
            return
        if 400 <= record.status < 500:
            self._tally.refused += 1
            self._tally.statuses[record.status] += 1
        else:
            self._tally.faults[f"bad request answered with {record.status}"] += 1

    def _any_request(self, short: bool) -> tuple[Target, PlannedRequest]:
        random = self.random
        prompt = Words().draw(random, random.choice((3, 20, 60)) if short else random.choice((3, 20, 100, 400)))
        if random.random() < 0.5:
            prompt = f"{random.choice(self._prompts)} {prompt}"
        request = PlannedRequest(
            0, prompt, random.choice((1, 4, 16)) if short else random.choice((1, 8, 32, 96)),
            n=1 if short else random.choice((1, 1, 1, 2, 3)), temperature=random.choice((0.0, 1.0)),
            seed=random.getrandbits(31),
        )  # fmt: skip
        endpoint = random.choice(("completions", "chat"))
        return replace(self._target, endpoint=endpoint, stream=random.random() < 0.7), request

    def _may_have_counted(self, request: PlannedRequest) -> None:
        """The server may count such a request wholly, partly or not at all."""
        self._tally.lost_choices += request.n
        self._tally.lost_prompt_tokens += 2 * len(str(request.prompt).split()) + 200
        self._tally.lost_output_tokens += request.max_tokens * request.n
