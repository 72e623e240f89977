"""HTTPS: served with a certificate, and refused in one sentence where it cannot be."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from engine.config import StartError
from server import lifecycle
from server.settings import load
from tests.server.harness import eventually
from tests.server.process import stub_server
from tests.server.test_connections import LIMITS, Running


def certificate(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=pagemill test", "-addext", "subjectAltName=IP:127.0.0.1",
         "-out", str(cert), "-keyout", str(key)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


def test_it_serves_over_tls_streams_included_and_cuts_off_who_never_shakes_hands(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    switches = ["--set", f"tls_cert={cert}", "--set", f"tls_key={key}", "--set", "client_timeout=1"]
    with stub_server(tmp_path / "log", *switches) as server:
        context = ssl.create_default_context(cafile=str(cert))
        url = server.url.replace("http:", "https:")
        silent = _connected(server.port)
        with httpx.Client(base_url=url, verify=context, trust_env=False) as client:
            assert client.get("/health").json() == {"status": "ready"}
            body = {"prompt": "x", "max_tokens": 5, "stream": True}
            with client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            assert "large" not in client.post("/v1/completions", json={"prompt": "x" * 3000}).text
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health", trust_env=False)  # a stranger's certificate
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url + "/health", trust_env=False)  # plain
        silent.settimeout(10)
        assert silent.recv(1) == b"", "no handshake within --client-timeout"
        silent.close()
        assert f"on {url}" in server.log
        assert "Traceback" not in server.log


def test_who_does_not_answer_the_end_of_tls_holds_up_nothing(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    switches = ["--set", f"tls_cert={cert}", "--set", f"tls_key={key}"]
    context = ssl.create_default_context(cafile=str(cert))
    ask = b"GET /health HTTP/1.1\r\nHost: x\r\n"
    with stub_server(tmp_path / "log", *switches) as server:
        closed, idle = (context.wrap_socket(_connected(server.port), server_hostname="127.0.0.1") for _ in range(2))
        for client, more in ((closed, b"Connection: close\r\n\r\n"), (idle, b"\r\n")):
            client.sendall(ask + more)
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 ")
        raw = socket.socket(fileno=closed.detach())  # from here on nobody speaks TLS on it
        raw.settimeout(10)
        while raw.recv(1 << 16):  # the server's word that it ends, then the end
            pass
        server.signal()
        assert server.wait(20) == 0
        assert "graceful" not in server.log
        raw.close()
        idle.close()


async def test_who_reads_the_last_answer_slowly_gets_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asyncio.constants, "SSL_SHUTDOWN_TIMEOUT", 0.2)  # what asyncio allows for it
    cert, key = certificate(tmp_path)
    running = Running(LIMITS, ssl_certfile=str(cert), ssl_keyfile=str(key))
    serving = asyncio.create_task(running.server.serve(sockets=[running.listener]))
    await eventually(lambda: running.server.started)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", running.port))
    context = ssl.create_default_context(cafile=str(cert))
    reader, writer = await asyncio.open_connection(sock=client, ssl=context, server_hostname="127.0.0.1", limit=1024)
    writer.write(b"GET /large HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    await asyncio.sleep(0.5)
    async with asyncio.timeout(60):
        assert (await reader.read()).count(b"y") == 4 << 20
    writer.close()
    running.server.should_exit = True
    await serving


def _connected(port: int) -> socket.socket:
    for _ in range(200):
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(0.05)
    raise AssertionError("nobody listens")


def test_what_cannot_be_used_is_told_in_one_sentence(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    _, other = certificate(tmp_path, "other")
    text = tmp_path / "text"
    text.write_text("nothing")
    locked = tmp_path / "locked"
    subprocess.run(
        ["openssl", "ec", "-in", str(key), "-aes256", "-passout", "pass:x", "-out", str(locked)],
        check=True, capture_output=True,
    )  # fmt: skip
    for flags in (
        {"tls_key": str(key)},
        {"tls_cert": str(tmp_path / "none")},
        {"tls_cert": str(text)},
        {"tls_cert": str(cert), "tls_key": str(other)},
        {"tls_cert": str(cert), "tls_key": str(locked)},
        {"tls_cert": str(cert)},
    ):
        with pytest.raises(StartError) as caught:
            lifecycle.check_tls(load(flags))
        assert str(caught.value).endswith(".")
        assert "\n" not in str(caught.value)
    both = tmp_path / "both"
    both.write_text(cert.read_text() + key.read_text())
    lifecycle.check_tls(load({"tls_cert": str(both)}))
