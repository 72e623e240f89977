"""The sweep finds what a known server can do; the report holds everything in one file."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loadtest import report, sweep
from loadtest.lengths import UsageError
from loadtest.report import make_sections, read_result
from loadtest.sweep import knee, latency_growth, parse_rates

from .fake_server import FakeServer


def point(rate: float, done: float, p90: float, growth: float = 0.0) -> dict[str, Any]:
    return {
        "rate": rate, "rates": {"requests_per_s": done, "output_tokens_per_s": done * 10}, "latency_growth": growth,
        "latency_s": {"e2e": {"p90": p90}}, "requests": {"completed": 5, "failed": 0},
    }  # fmt: skip


def test_growth_is_the_share_that_piles_up() -> None:
    arrivals = np.arange(40) / 50.0  # 50 a second
    queue = 0.04 + np.arange(40) * (1 / 20 - 1 / 50)  # 20 a second are served
    assert latency_growth(list(zip(arrivals, queue, strict=True))) == pytest.approx(50 / 20 - 1)
    flat = list(zip(arrivals, np.full(40, 0.04), strict=True))
    assert latency_growth(flat) == pytest.approx(0, abs=1e-12)
    slope = float(np.polyfit(arrivals, np.sin(arrivals), 1)[0])
    assert latency_growth(list(zip(arrivals, np.sin(arrivals), strict=True))) == pytest.approx(slope)
    assert latency_growth([(0.0, 1.0)]) == latency_growth([(1.0, 1.0)] * 5) == 0.0


def test_knee_of_a_hockey_stick() -> None:
    points = [
        point(1, 1, 0.1),
        point(2, 2, 0.11),
        point(4, 4, 0.13),
        point(5, 4.9, 0.4),
        point(6, 5, 2.0, 0.2),
        point(8, 5, 5.0, 0.6),
    ]
    found = knee(points)
    assert found["rate"] == 5
    assert found["sustained"] == 5
    assert found["saturated_requests_per_s"] == 5
    assert knee(points[:2])["rate"] is None, "too few points for a curve"
    assert knee([point(1, 1, 0.1)] * 4)["rate"] is None, "a server that never bends"


def test_rates() -> None:
    assert parse_rates("4,1,2.5") == [1, 2.5, 4]
    for wrong in ("", "1,x", "0,1"):
        with pytest.raises(UsageError):
            parse_rates(wrong)


def test_rates_go_up_until_the_server_is_saturated() -> None:
    kept_up, behind = point(4, 4, 0.1), point(4, 3, 2.0, 0.3)
    assert sweep.next_rate([1, 4], [point(1, 1, 0.1)], 8) == 4
    assert sweep.next_rate([1, 4], [point(1, 1, 0.1, 0.5)], 8) == 4, "asked for, whatever came before"
    assert sweep.next_rate([1, 4], [kept_up, kept_up], 8) == pytest.approx(4 * sweep.STEP_UP)
    assert sweep.next_rate([1, 4], [kept_up, behind], 8) is None
    assert sweep.next_rate([1, 4], [kept_up] * 8, 8) is None, "there is an end"


async def test_sweep_then_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A server with two slots of 30 ms each completes at most 66 requests a second."""
    parser = ArgumentParser()
    commands = parser.add_subparsers()
    sweep.add_parser(commands)
    report.add_parser(commands)
    flags = ["--workload", "W1", "--concurrency", "4", "--output-len", "3", "--no-progress", "--point-seconds", "0.4"]
    async with FakeServer(first_s=0.01, gap_s=0.01, slots=2).start() as server:
        arguments = parser.parse_args(
            ["sweep", "--url", server.url, *flags, "--rates", "10,30,300", "--arrivals", "constant",
             "--json", str(tmp_path / "s.json")]
        )  # fmt: skip
        assert await arguments.command(arguments) == 0
    result = json.loads((tmp_path / "s.json").read_text())
    assert 20 < result["capacity_requests_per_s"] < 70
    growths = [each["latency_growth"] for each in result["points"]]
    assert growths[0] < 0.1
    assert growths[2] > 1.0, "overload must show"
    assert result["knee"]["sustained"] in (10, 30)
    arguments = parser.parse_args(
        ["report", str(tmp_path / "s.json"), "--out", str(tmp_path / "out"), "--title", "A<b"]
    )
    assert await arguments.command(arguments) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "A&lt;b" in page
    assert page.count("data:image/png;base64,") == 1
    assert "http://" not in page.replace(result["url"], ""), "no other host"
    assert (tmp_path / "out" / "s-curve.png").stat().st_size > 5000
    assert "offered/s" in capsys.readouterr().out


def test_every_kind_of_result_has_a_section(tmp_path: Path) -> None:
    latency = {"count": 1, "mean": 0.1, "p50": 0.1, "p90": 0.1, "p99": 0.1, "max": 0.1}
    record = {"ttft_s": 0.1, "tpot_s": 0.01, "e2e_s": 0.2, "itl_s": [0.01, 0.02]}
    run = {
        "kind": "run", "workload": "W1", "loop": "closed", "duration_s": 1.0, "records": [record],
        "requests": {"completed": 1, "total": 1, "short": 0}, "errors": {},
        "tokens": {"prompt": 1, "cached": 0, "output": 3, "per_event": 1.0},
        "rates": {"requests_per_s": 1.0, "output_tokens_per_s": 3.0, "total_tokens_per_s": 4.0},
        "latency_s": {"ttft": latency, "itl": latency, "tpot": latency, "e2e": latency, "send_lag": latency},
        "server": {}, "client": {"cpu_us_per_token": 3.0, "share_of_core": 0.1, "saturated": True},
        "machine": {"load_before": 0.1, "cores_busy": 1.0},
        "series": [
            {"t": 0.0, "kv_cache_usage_perc": 0.1, "num_requests_running": 2, "rss_bytes": 1e8},
            {"t": 1.0, "kv_cache_usage_perc": 0.3},
        ],
    }  # fmt: skip
    row = {
        "workload": "W1",
        "server": "a",
        "metric": "output_tokens_per_s",
        "values": [3.0, 4.0, 5.0],
        "ratio": 1.0,
        "least": 1.0,
        "greatest": 1.0,
    }
    compare = {
        "kind": "compare", "ratios": [row, {**row, "server": "b", "ratio": 2.0}], "baseline": "a", "rounds": 3,
        "scale": 1.0, "runs": [], "servers": {"a": {"start_s": 1.0}}, "before": {"load": 0.1, "cores_busy": 0.0},
        "machine": {"cpu": "x", "cores": 2}, "failures": [],
    }  # fmt: skip
    soak = {"kind": "soak", "tally": {"completed": 3}, "faults": ["memory grew"], "series": run["series"]}
    numbers = {"served_tokens_per_s": 90.0, "generate_tokens_per_s": 30.0, "ratio": 3.0}
    ratio = {
        "kind": "ratio",
        "table": "t",
        "points": [{"lengths": "short", "concurrency": c, **numbers} for c in (1, 4)],
    }
    for kind, result, count in (("run", run, 2), ("compare", compare, 1), ("soak", soak, 1), ("ratio", ratio, 1)):
        (section,) = make_sections(result, kind, tmp_path)
        assert len(section.pictures) == count, kind
        assert all(picture.stat().st_size > 3000 for picture in section.pictures)
    (section,) = make_sections(run, "run", tmp_path)
    assert "WARNING    the client used most of a core" in section.text
    quiet = {**run, "series": [], "records": []}
    assert make_sections(quiet, "quiet", tmp_path)[0].pictures == []
    with pytest.raises(UsageError):
        make_sections({"kind": "novel"}, "x", tmp_path)
    with pytest.raises(UsageError):
        read_result(tmp_path / "missing.json")
