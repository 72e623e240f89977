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
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
MODEL = "demo"
KEY = "sk-test"


def find_command(name: str) -> str | None:
    """A command of the environment that has the server: this one, or the repository's."""
    folders = [Path(sys.executable).parent, ROOT / ".venv" / "bin"]
    return next((str(folder / name) for folder in folders if (folder / "pagemill").exists()), None)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serve(log: Path, *flags: str, key: str | None = KEY) -> Iterator[str]:
    """http://127.0.0.1:PORT of a server with these flags, ready; its model is MODEL."""
    command = os.environ.get("PAGEMILL_TEST_COMMAND") or find_command("pagemill")
    if command is None:
        pytest.skip("no pagemill command: install the package or run `make setup`")
    port = _free_port()
    start = [command, "serve", "--port", str(port), "--served-model-name", MODEL, *flags]
    if key is not None:
        start += ["--api-key", key]
    with log.open("wb") as out:
        process = subprocess.Popen(start, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=60)


@pytest.fixture(scope="session")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The server that most tests share; strict, for it knows all that these clients send."""
    if url := os.environ.get("PAGEMILL_TEST_URL"):
        yield url
        return
    log = tmp_path_factory.mktemp("server") / "log"
    with serve(log, "--kv-cache-memory", "128MiB", "--strict-fields") as url:
        yield url


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
