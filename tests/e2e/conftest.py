"""Real processes: `pagemill serve` with the demo model on a free port of 127.0.0.1, talked to over HTTP only."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.server.process import ServerProcess, free_port

# float32, so that equal requests in different batches may be compared token by token; a pool of about 4,000 tokens
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "192MiB", "--max-model-len", "2048", "--num-threads", "2")
KEY = "sk-e2e"


@contextlib.contextmanager
def real_server(log: Path, *flags: str, **env: str) -> Iterator[ServerProcess]:
    """`pagemill serve` with FLAGS and `flags`, ready."""
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", "--port", str(port), *FLAGS, *flags]
    server = ServerProcess(command, port, log, env)
    try:
        server.wait_for("ready", 300)
        yield server
    finally:
        server.end()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for every test that leaves it as it was."""
    with real_server(tmp_path_factory.mktemp("e2e") / "server.log") as server:
        yield server


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    """A server of the test's own: start(*flags, **environment)."""
    with contextlib.ExitStack() as stack:

        def starter(*flags: str, **env: str) -> ServerProcess:
            return stack.enter_context(real_server(tmp_path / "server.log", *flags, **env))

        yield starter


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False) as transport:
        yield openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, http_client=transport)
