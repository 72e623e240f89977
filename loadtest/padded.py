"""Plain `transformers.generate` as `loadtest ratio` runs it: padded batches under a KV budget, its own process."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.lengths import UsageError
from loadtest.workloads import PlannedRequest

BASELINE = Path(__file__).parent / "baselines" / "transformers_generate.py"


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one padded generate call."""

    requests: tuple[PlannedRequest, ...]

    @property
    def max_new_tokens(self) -> int:
        return max(request.max_tokens for request in self.requests)

    @property
    def kv_tokens(self) -> int:
        """Reserved: every row to the longest prompt plus the longest output."""
        longest = max(len(request.prompt) for request in self.requests)
        return len(self.requests) * (longest + self.max_new_tokens)

    @property
    def useful_tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)


def plan_batches(requests: Sequence[PlannedRequest], max_rows: int, kv_tokens: int) -> list[Batch]:
    """Sorted by prompt length, each batch as large as max_rows and the budget allow. Raises UsageError if one request
    alone is too large."""
    batches: list[Batch] = []
    for request in sorted(requests, key=lambda each: (len(each.prompt), each.max_tokens)):
        grown = Batch((*batches[-1].requests, request)) if batches else Batch((request,))
        if len(grown.requests) <= max_rows and grown.kv_tokens <= kv_tokens:
            batches[-1:] = [grown]
        else:
            batches.append(Batch((request,)))
        if batches[-1].kv_tokens > kv_tokens:
            raise UsageError(f"A request of {batches[-1].kv_tokens} tokens does not fit a KV of {kv_tokens} tokens.")
    return batches


def sample_batches(batches: Sequence[Batch], most: int | None, round_number: int) -> list[Batch]:
    """Every k-th batch, so that at most `most` remain (None: all). They are sorted by length, so every k-th is a fair
    sample; the first one moves on by the round."""
    every = -(-len(batches) // most) if most is not None else 1
    return list(batches[round_number % every :: every])


class Baseline:
    """The generate process, which waits stopped while it is not asked."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, model: str, threads: int, cache: str) -> Baseline:
        """Raises UsageError if it ends before it is ready; what it says goes to our stderr."""
        words = [sys.executable, str(BASELINE), model, "--threads", str(threads), "--cache", cache]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe, start_new_session=True)
        baseline = cls(process)
        await baseline._answer()
        process.send_signal(signal.SIGSTOP)
        return baseline

    @property
    def pid(self) -> int:
        return self._process.pid

    async def seconds(self, batches: Sequence[Batch]) -> float:
        """How long generate takes for all of them."""
        job = [
            {"prompts": [each.prompt for each in batch.requests], "max_new_tokens": batch.max_new_tokens}
            for batch in batches
        ]
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"batches": job}).encode() + b"\n")
        answer = await self._answer()
        self._process.send_signal(signal.SIGSTOP)
        return float(answer["seconds"])

    async def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise UsageError(f"The generate process ended with code {await self._process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        await self._process.wait()
