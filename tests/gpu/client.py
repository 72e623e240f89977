"""The project's load client in several processes at once: one alone may be the limit at tens of thousands of tokens a
second.

The processes are client_process.py's, started afresh and not forked: a fork would inherit handlers of signals, locks
and torch's threads, and multiprocessing's Pool, which ends its processes by SIGTERM, waits for ever for one whose
handler of SIGTERM Python calls too late.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.prompts import TokenIds
from loadtest.summary import percentile
from loadtest.workloads import Workload
from tests.gpu.client_process import READY, Job, Report

COMMAND = (sys.executable, "-m", "tests.gpu.client_process")
ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 100.0  # for every answer of a process: to be ready, to have run
START_IN_S = 0.1  # when all are ready


@dataclass(frozen=True, slots=True)
class Served:
    """A run, all processes together."""

    reports: Sequence[Report]

    @property
    def seconds(self) -> float:
        return max(each.finished_s for each in self.reports) - min(each.started_s for each in self.reports)

    @property
    def tokens_per_s(self) -> float:
        return sum(each.output_tokens for each in self.reports) / self.seconds

    @property
    def failed(self) -> int:
        return sum(each.failed for each in self.reports)

    @property
    def error(self) -> str:
        return next((each.error for each in self.reports if each.error), "")

    @property
    def client_share(self) -> float:
        """Of a core, of the busiest process."""
        return max(each.share_of_core for each in self.reports)

    def gap_ms(self, percent: float) -> float:
        gaps = sorted(gap for each in self.reports for gap in each.gaps_s)
        return percentile(gaps, percent) * 1e3 if gaps else math.nan

    def first_ms(self, percent: float) -> float:
        firsts = sorted(first for each in self.reports for first in each.first_s)
        return percentile(firsts, percent) * 1e3 if firsts else math.nan


def divided(workload: Workload, processes: int, seed: int) -> list[tuple[Workload, int]]:
    """Each process's part of a workload, and the seed that its requests are drawn with."""
    sessions, streams = (each // processes for each in (workload.num_sessions, workload.concurrency))
    part = replace(workload, num_sessions=sessions, concurrency=streams)
    return [(part, seed * 1000 + number) for number in range(processes)]


class ClientError(RuntimeError):
    """A client process ended, or said nothing in time."""


class Clients:
    """So many client processes, for as many runs as are wanted. They end when this does, or this process."""

    def __init__(self, processes: int, wait_s: float = WAIT_S, command: Sequence[str] = COMMAND) -> None:
        self._clients = [_Client(number, command, wait_s) for number in range(processes)]

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.end()

    def load(self, url: str, workload: Workload, source: TokenIds, seed: int = 0) -> Served:
        """Send a workload's requests in its closed loop; requests and concurrency are divided among the processes.
        Raises ClientError."""
        for client, (part, own_seed) in zip(self._clients, divided(workload, len(self._clients), seed), strict=True):
            client.tell(Job(url, part, source, own_seed).line())
        for client in self._clients:
            if client.answer("ready") != READY:
                raise ClientError(f"{client.name} said something else than that it is ready")
        start_at = json.dumps(time.perf_counter() + START_IN_S)
        for client in self._clients:
            client.tell(start_at)
        return Served([Report(**client.answer("done")) for client in self._clients])


class _Client:
    """One process, a line each way at a time."""

    def __init__(self, number: int, command: Sequence[str], wait_s: float) -> None:
        self._process = subprocess.Popen(command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        self._wait_s, self._heard = wait_s, bytearray()
        self.name = f"client process {number} (pid {self._process.pid})"

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: answer() says so
            self._process.stdin.write(f"{line}\n".encode())

    def answer(self, what: str) -> Any:
        """The next line it says. Raises ClientError."""
        assert self._process.stdout is not None
        pipe, until = self._process.stdout.fileno(), time.perf_counter() + self._wait_s
        while not self._heard.endswith(b"\n"):
            if not select.select([pipe], [], [], max(0.0, until - time.perf_counter()))[0]:
                raise ClientError(f"{self.name} was not {what} within {self._wait_s:g} s")
            heard = os.read(pipe, 1 << 16)
            if not heard:
                self.end()
                raise ClientError(f"{self.name} ended with {self._process.returncode} before it was {what}")
            self._heard += heard
        line, self._heard = self._heard, bytearray()
        return json.loads(line)

    def end(self) -> None:
        """By the end of its stdin. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
