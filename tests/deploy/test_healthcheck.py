"""The containers' health check against a server in each of its phases."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.server.process import ServerProcess, free_port, stub_server
from tests.server.test_tls import certificate

SCRIPT = Path(__file__).parents[2] / "deploy" / "healthcheck.py"


def check(port: int, *flags: str, **more: str) -> tuple[int, str]:
    env = {"PATH": os.environ["PATH"], "PAGEMILL_PORT": str(port), "http_proxy": "http://127.0.0.1:1"} | more
    done = subprocess.run([sys.executable, "-I", str(SCRIPT), *flags], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout.strip()


def both(server: ServerProcess) -> list[tuple[int, str]]:
    return [check(server.port), check(server.port, "--alive")]


def test_ready_and_loading(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--load", "3") as server:
        server.wait_for("starting")
        assert both(server) == [(1, "starting"), (0, "starting")]
        server.wait_for("ready")
        assert both(server) == [(0, "ready"), (0, "ready")]


def test_a_step_that_hangs(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--hung") as server:
        server.wait_for("hung")
        assert both(server) == [(1, "hung"), (1, "hung")]


def test_a_server_that_speaks_https(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with stub_server(tmp_path / "log", "--set", f"tls_cert={cert}", "--set", f"tls_key={key}") as server:
        until = time.monotonic() + 30
        while (found := check(server.port, PAGEMILL_TLS_CERT=str(cert))) != (0, "ready"):
            assert time.monotonic() < until, found
            time.sleep(0.1)
        assert check(server.port) == (0, "ready")  # its settings may stand in a file, which the check does not read


def test_a_server_with_keys_needs_none_for_its_health(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--set", "api_key=sk-health") as server:
        server.wait_for("ready")
        assert httpx.get(f"{server.url}/v1/models", trust_env=False).status_code == 401
        assert both(server) == [(0, "ready"), (0, "ready")]


def test_https_is_not_taken_for_granted(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log") as server:
        server.wait_for("ready")
        code, said = check(server.port, PAGEMILL_TLS_CERT="some.crt")
        assert code == 1
        assert "SSL" in said


@pytest.mark.parametrize("flags", [(), ("--alive",)])
def test_nobody_there(flags: tuple[str, ...]) -> None:
    code, said = check(free_port(), *flags)
    assert code == 1
    assert said.startswith("no answer on port")
