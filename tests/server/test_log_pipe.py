"""The log over a pipe: a reader that stops reading stops nobody."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

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


def handler_on(stream: TextIO) -> PipeHandler:
    handler = PipeHandler(stream)
    handler.setFormatter(logs.TextFormatter())
    return handler


def tell(handler: PipeHandler, *numbers: int) -> None:
    for number in numbers:
        text = f"number={number} " + "x" * 1000
        handler.handle(logging.LogRecord("pagemill.server", logging.INFO, "", 0, text, (), None))


def numbers_of(lines: Iterable[str]) -> list[int]:
    return [int(line.partition("number=")[2].split()[0]) for line in lines if "number=" in line]


def test_a_pipe_that_does_not_wait_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pipe, "FLUSH_S", 0.05)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # as another process that has it, too, may do at any time
    with os.fdopen(writing, "w") as stream, os.fdopen(reading, "rb", buffering=0) as reader:
        handler = handler_on(stream)
        tell(handler, *range(500))
        handler.flush()
        read = b""
        while b"number=499" not in read and select.select((reader,), (), (), 10)[0]:
            read += reader.read(1 << 16)
        lines = read.decode().splitlines()
        assert numbers_of(lines) == list(range(500))
        assert {len(line.partition("number=")[2].partition(" ")[2]) for line in lines[:-1]} == {1000}, "whole lines"


def test_a_reader_that_comes_back_hears_how_much_it_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_pipe, "FLUSH_S", 60)  # all is written before the next step
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    first = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    with pipe.open("w") as stream:
        handler = handler_on(stream)
        tell(handler, 1)
        handler.flush()
        assert numbers_of(os.read(first, 1 << 16).decode().splitlines()) == [1]
        os.close(first)
        tell(handler, 2, 3, 4)
        handler.flush()
        with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as second:
            tell(handler, 5)
            handler.flush()
            lines = second.read().splitlines()
    assert numbers_of(lines) == [5]
    assert "lines were lost" in lines[1]
    assert lines[1].endswith("count=3")


def test_a_terminal_may_be_stopped() -> None:
    controlling, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream, os.fdopen(controlling, "rb"):
        assert is_pipe(stream)


@pytest.mark.parametrize("place", ["/dev/full", "closed pipe"])
def test_a_log_that_takes_nothing_changes_no_exit_code(place: str) -> None:
    port = free_port()
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as nobody, Path("/dev/full").open("w") as full:
        stream = full if place == "/dev/full" else nobody
        server = ServerProcess(stub_command(port), port, stream)
        try:
            server.wait_for("ready")
            assert httpx.get(server.url + "/v1/models", timeout=10, trust_env=False).status_code == 200
            server.signal()
            assert server.wait() == 0
        finally:
            server.end()


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
