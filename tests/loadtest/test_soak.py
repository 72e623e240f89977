"""A good server passes, each fault of a bad one is named."""

from __future__ import annotations

import asyncio
import os
import socket
from argparse import ArgumentParser
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from loadtest import cli, soak
from loadtest.client import Target
from loadtest.machine import open_handles
from loadtest.scrape import find, live_slot_utilization, parse_metrics, scrape
from loadtest.soak_checks import Tally, check_answers, check_growth, check_idle, check_sums
from loadtest.soak_traffic import Traffic
from loadtest.transport import RawTransport

from .fake_server import FakeServer
from .test_compare import FAKE, REPOSITORY

TEXT = """# TYPE pagemill_errors_total counter
pagemill_errors_total{code="400"} 3.0
pagemill_errors_total{code="404"} 1.0
pagemill_request_success_total{finished_reason="length"} 7.0
pagemill_request_success_total{finished_reason="abort"} 2.0
pagemill_generation_tokens_total 70.0
vllm:num_requests_running{model_name="a b"} 2.0
pagemill_time_to_first_token_seconds_bucket{le="+Inf"} 9.0
pagemill_time_to_first_token_seconds_count 8.0
pagemill_live_slot_steps_total 1.5e+03
pagemill_used_slot_steps_total 1600
"""


def test_prometheus_text() -> None:
    metrics = parse_metrics(TEXT)
    assert find(metrics, "errors_total") == 4
    assert find(metrics, 'errors_total{code="400"}') == 3
    assert find(metrics, "num_requests_running") == 2
    assert find(metrics, "requests_running") is None, "the end of another name is not a name"
    assert "pagemill_time_to_first_token_seconds_bucket" not in metrics
    start = {"pagemill_live_slot_steps_total": 500.0, "pagemill_used_slot_steps_total": 600.0}
    assert live_slot_utilization(start, metrics) == 1.0
    assert live_slot_utilization(metrics, metrics) is None
    assert live_slot_utilization({}, metrics) is None


def test_sums_that_do_not_add_up_are_named() -> None:
    before, after = dict.fromkeys(parse_metrics(TEXT), 0.0), parse_metrics(TEXT)
    right = Tally(
        completed=3,
        completed_choices=7,
        output_tokens=66,
        lost_output_tokens=4,
        lost_choices=1,
        statuses=Counter({400: 3, 404: 1}),
    )
    assert check_sums(before, after, right) == []
    wrong = Tally(completed=3, completed_choices=9, output_tokens=60, lost_output_tokens=4, statuses=Counter({400: 2}))
    faults = check_sums(before, after, wrong)
    assert len(faults) == 4
    for words in (
        "generation_tokens_total rose by 70",
        "time_to_first_token",
        "7 choices ended well",
        "3 answers 400",
    ):
        assert any(words in fault for fault in faults), words


def test_idle_and_answers() -> None:
    assert (
        check_idle(
            {"pagemill_num_requests_running": 0, "pagemill_kv_cache_usage_perc": 0, "pagemill_http_in_flight": 1}
        )
        == []
    )
    assert len(check_idle({"pagemill_num_requests_waiting": 1, "pagemill_kv_cache_usage_perc": 0.01})) == 2
    assert check_answers(Tally(completed=1)) == []
    assert len(check_answers(Tally(unfinished=2, faults=Counter({"http 500": 1})))) == 3


def test_growth_has_a_slope_and_a_cache_has_an_end() -> None:
    def samples(second_half_mib: float, files: int = 0) -> list[dict[str, float]]:
        rows = []
        for t in range(101):
            mib = min(t, 50) * 4 + max(0, t - 50) / 50 * second_half_mib
            rows.append({"t": float(t), "rss_bytes": 2**20 * mib, "open_files": 10.0 + files * t / 100})
        return rows

    assert check_growth(samples(1.0), memory_limit_bytes=8 * 2**20) == [], "filled, then level"
    (fault,) = check_growth(samples(20.0), memory_limit_bytes=8 * 2**20)
    assert fault.startswith("memory grew by 20.0 MiB in 50 s")
    (fault,) = check_growth(samples(1.0, files=40), memory_limit_bytes=8 * 2**20)
    assert fault == "open_files rose from 10 to 50"
    for name in ("sockets", "threads", "event_loop_tasks"):
        rows = [{"t": float(t), name: float(t)} for t in range(20)]
        assert check_growth(rows, memory_limit_bytes=1) == [f"{name} rose from 0 to 19"]
    assert check_growth([], memory_limit_bytes=1) == []


def test_sockets_are_counted_apart_from_files(tmp_path: Path) -> None:
    files, sockets = open_handles(os.getpid())
    with socket.socket(), (tmp_path / "x").open("w"):
        now = open_handles(os.getpid())
    assert (now[0] - files, now[1] - sockets) == (2, 1)


async def soak_it(server: FakeServer, monkeypatch: pytest.MonkeyPatch, *flags: str) -> tuple[int, str]:
    monkeypatch.setattr(soak, "IDLE_WAIT_S", 0.5)
    parser = ArgumentParser()
    soak.add_parser(parser.add_subparsers())
    async with server.start():
        arguments = parser.parse_args(["soak", "--url", server.url, "--duration", "0.8s", "--timeout", "5", *flags])
        result = await soak.soak(arguments)
    return result["tally"]["completed"], "\n".join(result["faults"])


async def test_a_good_server_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    completed, faults = await soak_it(FakeServer(first_s=0.001, gap_s=0.0005), monkeypatch)
    assert faults == ""
    assert completed > 24, "more than the burst"


async def test_lost_blocks_show() -> None:
    server, tally = FakeServer(first_s=0.02, gap_s=0.01, leak=True), Tally()
    async with server.start():
        transport = RawTransport(server.url)
        traffic = Traffic(transport, Target("fake"), tally, Random(3))
        await asyncio.gather(*(traffic.leaving() for _ in range(8)))
        for _ in range(400):  # a request that streams notices at its next token
            if server.used_blocks == sum(request.disconnected for request in server.served) > 0:
                break
            await asyncio.sleep(0.01)
        metrics = await scrape(transport)
        await transport.close()
    assert tally.disconnected == 8
    assert metrics is not None
    assert any("kv_cache_usage_perc" in fault for fault in check_idle(metrics))


async def test_failures_and_hangs_show(monkeypatch: pytest.MonkeyPatch) -> None:
    _, faults = await soak_it(FakeServer(first_s=0.001, gap_s=0.0005, statuses=[200] * 3 + [500] * 2), monkeypatch)
    assert "http 500" in faults or "bad request answered with 500" in faults
    _, faults = await soak_it(FakeServer(first_s=0.2, gap_s=0.5), monkeypatch, "--timeout", "0.4")
    assert "timeout" in faults


def test_command_starts_and_ends_its_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(REPOSITORY)
    result = tmp_path / "soak.json"
    flags = ["--command", f"{FAKE} --first 0.001 --gap 0.0005", "--duration", "1.2s", "--json", str(result)]
    assert cli.main(["soak", *flags]) == 0
    assert "no faults" in capsys.readouterr().out
    assert '"open_files"' in result.read_text()
