"""How far a start has come: on a terminal, in /health, and nowhere else."""

from __future__ import annotations

import asyncio
import io
import logging
import os
import pty
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.outputs import Phase
from engine.progress import Progress
from server import logs
from server.progress import CLEAR, Bar, shown
from server.settings import Settings, load
from tests.server.fake_engine import FakeEngine, says, small_tokenizer
from tests.server.harness import client_of
from tests.server.process import ROOT, free_port, stub_server


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at(phase: str, done: int = 0, total: int = 0) -> Progress:
    progress = Progress()
    progress.enter(phase)
    progress.done, progress.total = done, total
    return progress


def test_a_line_tells_the_phase_and_how_far_it_is() -> None:
    line = Bar(at("weights", 1 << 30, 4 << 30), Terminal()).line(80)
    assert line == "loading: weights  [######------------------]  25% of 4.29 GB  0 s"
    assert Bar(at("warm_up"), Terminal()).line(80) == "loading: warm up  0 s"
    assert len(Bar(at("weights", 1, 2), Terminal()).line(20)) == 20
    assert "100%" in Bar(at("pack", 9, 4), Terminal()).line(80), "a tensor may be read twice"


def test_a_phase_begins_with_nothing_done() -> None:
    progress = at("weights", 5, 10)
    assert progress.share == 0.5
    progress.enter("pack")
    assert (progress.phase, progress.done, progress.share) == ("pack", 0, None)


async def test_a_log_line_takes_its_place_and_the_end_leaves_nothing() -> None:
    terminal, logger = Terminal(), logging.getLogger("pagemill.engine")
    logs.configure("info", "text", terminal)
    try:
        with shown(at("weights", 1, 2), Settings(), terminal):
            await asyncio.sleep(0)
            drawn = terminal.getvalue()
            assert drawn.startswith(CLEAR + "loading: weights")
            logger.warning("something")
            assert terminal.getvalue().removeprefix(drawn).startswith(CLEAR)
            assert "\r" not in terminal.getvalue().rpartition(CLEAR)[2], "the line stands alone"
            await asyncio.sleep(0.15)
            assert terminal.getvalue().count("loading") >= 2, "then it is drawn again"
        assert terminal.getvalue().endswith(CLEAR)
        before = terminal.getvalue()
        logger.warning("more")
        assert CLEAR not in terminal.getvalue().removeprefix(before)
    finally:
        logs.configure("info", "text")


@pytest.mark.parametrize("settings", [{"log_format": "json"}, {"log_level": "warning"}])
async def test_who_wants_json_or_silence_sees_nothing(settings: dict[str, Any]) -> None:
    terminal = Terminal()
    with shown(at("weights"), load(settings), terminal):
        await asyncio.sleep(0.01)
    assert terminal.getvalue() == ""


async def test_what_is_no_terminal_gets_nothing() -> None:
    file = io.StringIO()
    with shown(at("weights"), Settings(), file):
        await asyncio.sleep(0.01)
    assert file.getvalue() == ""


async def test_health_says_what_is_being_loaded() -> None:
    tokenizer = small_tokenizer()
    engine = FakeEngine(says("x", tokenizer), tokenizer=tokenizer)
    engine.phase = Phase.STARTING
    async with client_of(engine) as client:

        async def health() -> dict[str, Any]:
            response = await client.get("/health")
            assert response.status_code == 503
            return dict(response.json())

        assert await health() == {"status": "starting"}
        engine.progress.enter("weights")
        assert await health() == {"status": "starting", "loading": "weights", "share": None}
        engine.progress.done, engine.progress.total = 1, 3
        assert await health() == {"status": "starting", "loading": "weights", "share": 0.33}
        engine.phase = Phase.READY
        assert (await client.get("/health")).json() == {"status": "ready"}


def test_a_server_without_a_terminal_logs_no_control_characters(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--load", "0.5") as server:
        server.wait_for("starting")
        health = httpx.get(server.url + "/health", trust_env=False).json()
        assert health == {"status": "starting", "loading": "weights", "share": 0.25}
        server.wait_for("ready")
        server.signal()
        assert server.wait() == 0
        assert "\x1b" not in server.log
        assert "loading" not in server.log


def test_a_server_on_a_terminal_draws_until_it_is_ready(tmp_path: Path) -> None:
    main_end, terminal = pty.openpty()
    command = [sys.executable, "-m", "tests.server.stub_engine", str(free_port()), "--load", "0.5"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    seen = bytearray()

    def read() -> None:
        while True:
            try:
                chunk = os.read(main_end, 4096)
            except OSError:  # the other end is closed
                return
            seen.extend(chunk)
            if b"ready: serving" in seen and process.poll() is None:
                process.terminate()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    assert process.wait(60) == 0
    reader.join(10)
    os.close(main_end)
    text = seen.decode()
    assert "loading: weights  [######------" in text
    assert "loading" not in text.partition("ready: serving")[2]
    before_ready = text.partition("ready: serving")[0]
    assert before_ready.rpartition("loading")[2].count(CLEAR) == 1, "it is gone before the next line"
