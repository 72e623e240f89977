"""The life of the process, from outside, around a stub engine: load, serve, drain, die."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config import StartError
from server import lifecycle
from server.settings import load
from tests.server.process import ROOT, ServerProcess, free_port, stub_command, stub_server

BODY = {"prompt": "x", "max_tokens": 60, "stream": True}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


def client_of(server: ServerProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=30, trust_env=False)


async def stream(client: httpx.AsyncClient, **changes: Any) -> list[str]:
    """The data of each event."""
    async with client.stream("POST", "/v1/completions", json=BODY | changes) as response:
        assert response.status_code == 200
        return [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]


def test_it_listens_while_the_model_loads(log: Path) -> None:
    with stub_server(log, "--load", "1.5") as server:
        server.wait_for("starting")
        health = httpx.get(server.url + "/health", trust_env=False)
        assert health.status_code == 503
        refused = httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_starting"
        assert httpx.get(server.url + "/metrics", trust_env=False).status_code == 200
        assert httpx.get(server.url + "/version", trust_env=False).json()["version"]
        server.wait_for("ready")
        served = httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, trust_env=False)
        assert served.status_code == 200
        for fact in ("start-up seconds", "KV pool", "sampling defaults", server.url):
            assert fact in server.log


@pytest.mark.parametrize(
    ("switches", "warns"),
    [((), False), (("host=0.0.0.0",), True), (("host=0.0.0.0", "api_key=k"), False), (("host=localhost",), False)],
)
def test_a_server_that_is_open_to_all_says_so(log: Path, switches: tuple[str, ...], warns: bool) -> None:
    with stub_server(log, *(part for switch in switches for part in ("--set", switch))) as server:
        server.wait_for("ready")
        for _ in range(200):
            if "ready: serving" in server.log:  # the last line of the start
                break
            time.sleep(0.02)
        assert "ready: serving" in server.log
        assert ("everybody who reaches this port is served" in server.log) is warns


def test_a_connection_that_has_nothing_to_say_is_closed_after_keep_alive(log: Path) -> None:
    with stub_server(log, "--set", "keep_alive=1") as server:
        server.wait_for("ready")
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:  # less than the default
            client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            said = b""
            while piece := client.recv(1 << 16):
                said += piece
        assert said.count(b"HTTP/1.1 200 ") == 1
        assert b"connection: close" not in said.lower()  # idleness alone ended it


def test_a_model_that_cannot_be_loaded_is_one_sentence(log: Path) -> None:
    with stub_server(log, "--start-error", "There is no such model.") as server:
        assert server.wait() == 1
        assert server.log.strip().splitlines()[-1] == "pagemill: There is no such model."
        assert "Traceback" not in server.log


def test_a_parser_that_is_unknown_is_one_sentence(log: Path) -> None:
    with stub_server(log, "--set", "tool_call_parser=nonsense") as server:
        assert server.wait() == 1
        assert "pagemill: --tool-call-parser nonsense: there is" in server.log
        assert "Traceback" not in server.log


def test_a_signal_while_loading_ends_at_once(log: Path) -> None:
    with stub_server(log, "--load", "60") as server:
        server.wait_for("starting")
        began = time.monotonic()
        server.signal()
        assert server.wait() == 0
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_draining_lets_streams_finish_and_refuses_new_work(log: Path, number: int) -> None:
    with stub_server(log, "--interval", "0.02") as server:
        await asyncio.to_thread(server.wait_for, "ready")
        async with client_of(server) as client:
            await client.get("/health")  # a connection that is kept alive
            streamed = asyncio.create_task(stream(client))
            plain = asyncio.create_task(client.post("/v1/completions", json=BODY | {"stream": False}))
            await asyncio.sleep(0.3)
            server.signal(number)
            await asyncio.sleep(0.2)
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            assert refused.headers["connection"] == "close"
            assert (await client.get("/health")).json() == {"status": "draining"}
            events = await streamed
            assert events[-1] == "[DONE]"
            assert '"finish_reason":"length"' in events[-2]
            answer = await plain
            assert answer.status_code == 200
            assert answer.json()["usage"]["completion_tokens"] == 60
        assert await asyncio.to_thread(server.wait) == 0


async def test_after_the_grace_period_the_rest_ends_with_an_error_event(log: Path) -> None:
    with stub_server(log, "--interval", "0.05", "--set", "grace_period=0.4") as server:
        await asyncio.to_thread(server.wait_for, "ready")
        async with client_of(server) as client:
            streamed = asyncio.create_task(stream(client, max_tokens=4000))
            plain = asyncio.create_task(
                client.post("/v1/completions", json=BODY | {"stream": False, "max_tokens": 4000})
            )
            await asyncio.sleep(0.3)
            server.signal()
            events = await streamed
            assert events[-1] == "[DONE]"
            assert '"error"' in events[-2]
            assert (await plain).status_code == 503
        assert await asyncio.to_thread(server.wait) == 0


async def test_a_second_signal_ends_at_once(log: Path) -> None:
    with stub_server(log, "--interval", "0.05") as server:
        await asyncio.to_thread(server.wait_for, "ready")
        async with client_of(server) as client:
            streamed = asyncio.create_task(stream(client, max_tokens=4000))
            await asyncio.sleep(0.3)
            server.signal()
            server.signal()  # passed on by a parent: still the first
            await asyncio.sleep(0.5)
            assert server.process.poll() is None
            server.signal()
            assert await asyncio.to_thread(server.wait, 2.0) == 1
            with pytest.raises(httpx.TransportError):
                await streamed


async def test_when_the_engine_dies_clients_hear_of_it_and_the_process_fails(log: Path) -> None:
    with stub_server(log, "--interval", "0.02", "--die-after", "2") as server:
        await asyncio.to_thread(server.wait_for, "ready")
        async with client_of(server) as client:
            events = await stream(client, max_tokens=4000)
            assert events[-1] == "[DONE]"
            assert '"error"' in events[-2]
        assert await asyncio.to_thread(server.wait) == 1


def test_a_hung_step_makes_it_unhealthy(log: Path) -> None:
    with stub_server(log, "--hung") as server:
        server.wait_for("hung")
        assert httpx.get(server.url + "/health", trust_env=False).status_code == 503


async def test_gauges_fall_to_zero_when_clients_leave(log: Path) -> None:
    with stub_server(log) as server:
        await asyncio.to_thread(server.wait_for, "ready")
        async with client_of(server) as client:
            tasks = [asyncio.create_task(stream(client, max_tokens=4000)) for _ in range(4)]
            tasks += [asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4000}))]
            await asyncio.sleep(0.5)
            assert "pagemill_num_requests_running 5.0" in (await client.get("/metrics")).text
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.3)
        async with client_of(server) as client:
            text = (await client.get("/metrics")).text
        assert "pagemill_num_requests_running 0.0" in text
        assert "pagemill_client_disconnects_total 5.0" in text
        assert "pagemill_http_in_flight 1.0" in text, "only the request for /metrics itself"


def test_the_process_knows_when_it_was_created() -> None:
    program = "import time; time.sleep(0.5); from server.lifecycle import process_started_s as started; "
    program += "print(time.monotonic() - started())"
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 0.5 <= float(done.stdout) <= time.monotonic() - began + 0.02


def test_connections_give_way_before_the_system_has_no_more_files(log: Path) -> None:
    port = free_port()
    limited = ["sh", "-c", 'ulimit -n 80 && exec "$@"', "sh", *stub_command(port)]
    server = ServerProcess(limited, port, log)
    held: list[socket.socket] = []
    try:
        server.wait_for("ready")
        held += [socket.create_connection(("127.0.0.1", port)) for _ in range(120)]
        for _ in range(3):
            answer = httpx.get(server.url + "/metrics", timeout=10, trust_env=False)
            assert "pagemill_connections_closed_total 0.0" not in answer.text
        assert "open_files=80 max_connections=40 wanted=4096" in server.log
    finally:
        server.end()
        for client in held:
            client.close()


def test_a_taken_port_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(StartError, match=rf"^Cannot listen on 127\.0\.0\.1:{port}: address already in use\.$"):
            lifecycle.bind(load({"port": str(port)}))


@pytest.mark.parametrize("host", ["203.0.113.9", "no such host"])
def test_an_address_that_is_not_ours_is_one_sentence(host: str) -> None:
    with pytest.raises(StartError, match=r"^Cannot listen on "):
        lifecycle.bind(load({"host": host}))
