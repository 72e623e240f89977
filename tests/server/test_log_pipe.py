"""The log over a pipe: a reader that stops reading stops nobody."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import httpx
import pytest

from server import log_pipe, logs
from server.log_pipe import PipeHandler, is_pipe
from tests.server.process import ServerProcess, free_port, stub_command


def test_lines_that_nobody_reads_are_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pipe, "MAX_LINES", 50)
    monkeypatch.setattr(log_pipe, "FLUSH_S", 0.05)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream, os.fdopen(reading) as reader:
        assert is_pipe(stream)
        handler = PipeHandler(stream)
        handler.setFormatter(logs.TextFormatter())

        def tell(number: int) -> None:
            text = f"number={number} " + "x" * 1000
            handler.handle(logging.LogRecord("pagemill.server", logging.INFO, "", 0, text, (), None))

        for number in range(1000):  # a pipe takes some 64 of them
            tell(number)
        handler.flush()  # does not wait for ever
        seen, num_lost, num_told = [], 0, 1000
        while 1000 not in seen:
            line = reader.readline()
            if "lines were lost" in line:
                num_lost += int(line.rpartition("count=")[2])
                tell(1000)  # until it finds room
                num_told += 1
            else:
                seen.append(int(line.partition("number=")[2].split()[0]))
        assert seen == sorted(seen)
        assert 1001 <= len(seen) + num_lost <= num_told
        assert num_lost > 800


def test_a_file_is_no_pipe(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as file:
        assert not is_pipe(file)


def test_a_server_whose_log_nobody_reads_serves_and_ends() -> None:
    reading, writing = os.pipe()
    port = free_port()
    with os.fdopen(reading), os.fdopen(writing, "w") as stream:
        os.set_blocking(writing, False)
        while True:
            try:
                os.write(writing, b"x" * 1024)
            except BlockingIOError:
                break
        os.set_blocking(writing, True)
        server = ServerProcess(stub_command(port), port, stream)
        try:
            server.wait_for("ready")
            for _ in range(20):
                assert httpx.get(server.url + "/v1/models", timeout=10, trust_env=False).status_code == 200
            server.signal()
            assert server.wait() == 0
        finally:
            server.end()
