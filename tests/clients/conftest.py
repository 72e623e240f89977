"""Real clients against a real server: the demo model, small memory, one server for the whole run.

The clients live in an environment of their own (requirements.txt, and package.json for Node); a client that is not
installed is skipped by name. The server's command is `pagemill` of this environment or of the repository's .venv;
PAGEMILL_TEST_COMMAND names another, PAGEMILL_TEST_URL a server that runs already.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
MODEL = "demo"
KEY = "sk-test"


def _command() -> str | None:
    if named := os.environ.get("PAGEMILL_TEST_COMMAND"):
        return named
    places = [Path(sys.executable).parent / "pagemill", ROOT / ".venv" / "bin" / "pagemill"]
    return next((str(place) for place in places if place.exists()), None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """http://127.0.0.1:PORT of a server that is ready; its key is KEY, its model MODEL."""
    if url := os.environ.get("PAGEMILL_TEST_URL"):
        yield url
        return
    command = _command()
    if command is None:
        pytest.skip("no pagemill command: install the package or run `make setup`")
    port = _free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [
                *(command, "serve", "--port", str(port), "--api-key", KEY, "--served-model-name", MODEL),
                *("--kv-cache-memory", "128MiB", "--tool-call-parser", "hermes"),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(1200):
        if process.poll() is not None:
            raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
        try:
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the server did not become ready")


@pytest.fixture
def v1(base_url: str) -> str:
    return base_url + "/v1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Other people's packages warn as they like."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
