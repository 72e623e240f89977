"""A server process for tests: started on a free port, waited for, ended by its own id."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import httpx

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class ServerProcess:
    """`command` plus the port; stderr goes to `log`."""

    def __init__(
        self, command: Sequence[str], port: int, log: Path | TextIO, env: dict[str, str] | None = None
    ) -> None:
        """log: a file to make, or an open one that only others read."""
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self._log = log if isinstance(log, Path) else Path(os.devnull)
        with log.open("w") if isinstance(log, Path) else contextlib.nullcontext(log) as stderr:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=stderr, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})}
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_for(self, status: str, timeout_s: float = 60.0) -> None:
        """Until /health says `status`; raises if the process ends or time runs out."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log}")
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/health", timeout=5, trust_env=False).json()["status"] == status:
                    return
            time.sleep(0.05)
        raise AssertionError(f"not {status} within {timeout_s} s:\n{self.log}")

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit code."""
        return self.process.wait(timeout_s)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def stub_command(port: int, *switches: str) -> list[str]:
    return [sys.executable, "-m", "tests.server.stub_engine", str(port), *switches]


@contextlib.contextmanager
def stub_server(log: Path, *switches: str) -> Iterator[ServerProcess]:
    """The real life cycle around a stub engine; not waited for."""
    port = free_port()
    server = ServerProcess(stub_command(port, *switches), port, log)
    try:
        yield server
    finally:
        server.end()
