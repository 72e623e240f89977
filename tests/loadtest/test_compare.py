"""Comparisons: real processes (the fake server), interleaved, ended; the arithmetic of scale and ratio."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

import pytest

from loadtest import cli
from loadtest.cli_compare import SPECS, comparison_table, duration, server_line
from loadtest.compare import Comparison, fit_budget, ratios, read_spec
from loadtest.lengths import UsageError, fixed
from loadtest.machine import CpuMark, cpu_seconds, process_tree, resident_bytes
from loadtest.servers import Server, ServerSpec
from loadtest.workloads import Workload

REPOSITORY = Path(__file__).parents[2]
FAKE = f"{sys.executable} -m tests.loadtest.fake_server --port {{port}}"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def write_spec(path: Path, servers: Sequence[str], extra: str = "") -> Path:
    rows = "\n".join(servers)
    path.write_text(f'rounds = 2\nworkloads = ["W1"]\n{extra}\n{rows}')
    return path


def row(name: str, gap: float) -> str:
    command = f"{FAKE} --first 0.001 --gap {gap}"
    return f'[[server]]\nname = "{name}"\ncommand = """{command}"""\ncwd = "{REPOSITORY}"\nmodel = "fake"\n'


def test_compare_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = write_spec(tmp_path / "s.toml", [row("slow", 0.002), row("fast", 0.0)])
    result_path = tmp_path / "r.json"
    assert cli.main(["compare", str(spec), "--scale", "0", "--json", str(result_path), "--logs", str(tmp_path)]) == 0
    result = json.loads(result_path.read_text())
    assert result["scale"] == 0
    order = [(run["round"], run["server_name"]) for run in result["runs"]]
    assert order == [(0, "slow"), (0, "fast"), (1, "fast"), (1, "slow")], "interleaved, order rotated"
    counts = {run["requests"]["completed"] for run in result["runs"]}
    assert counts == {3}, "the same requests for all, a round each"
    assert all(run["machine"]["cores_others"] >= 0 for run in result["runs"])
    assert set(result["servers"]) == {"slow", "fast"}
    found = {(each["server"], each["metric"]): each for each in result["ratios"]}
    assert found["slow", "output_tokens_per_s"]["ratio"] == 1
    rate = found["fast", "output_tokens_per_s"]
    assert rate["ratio"] > 1.3
    assert rate["least"] <= rate["ratio"] <= rate["greatest"]
    assert found["fast", "tpot_p50"]["ratio"] < 1
    assert "baseline slow" in capsys.readouterr().out


def test_a_budget_that_is_too_small_costs_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, result_path = write_spec(tmp_path / "s.toml", [row("only", 0.0)]), tmp_path / "r.json"
    assert cli.main(["compare", str(spec), "--budget", "0.01s", "--json", str(result_path)]) == 0
    result = json.loads(result_path.read_text())
    assert (result["rounds"], len(result["runs"])) == (1, 1)
    assert result["scale"] < 0.01
    assert "too little for 2 rounds" in capsys.readouterr().err


async def test_server_is_paused_resumed_and_ended(tmp_path: Path) -> None:
    server = Server(ServerSpec("fake", FAKE, cwd=str(REPOSITORY), env={"X": "{port}"}))
    await server.start({}, tmp_path / "log")
    pid = server.pid
    assert pid is not None
    assert resident_bytes(pid) > 1_000_000
    assert cpu_seconds(pid) > 0
    assert pid in process_tree(os.getpid())
    server.pause()
    await asyncio.sleep(0.05)
    assert state(pid) == "T", "stopped"
    server.resume()
    server.pause()
    await server.end()  # a stopped process cannot take SIGTERM: it must be resumed first
    assert not alive(pid)
    await server.end()


async def test_a_server_that_dies_says_why(tmp_path: Path) -> None:
    for command, words in (
        (f"{sys.executable} -c \"raise SystemExit('no model here')\"", "no model here"),
        ("/no/such", "start"),
    ):
        with pytest.raises(UsageError, match=words):
            await Server(ServerSpec("bad", command)).start({}, tmp_path / "log")
    with pytest.raises(UsageError, match="model_dir"):
        await Server(ServerSpec("bad", "x {model_dir}")).start({}, tmp_path / "log")
    silent = ServerSpec("silent", f"{sys.executable} -c 'import time; time.sleep(60)'", ready_timeout_s=0.3)
    server = Server(silent)
    with pytest.raises(UsageError, match="did not get ready"):
        await server.start({}, tmp_path / "log")
    assert server.pid is None


async def test_failed_warm_up_ends_all_servers(tmp_path: Path) -> None:
    broken = row("broken", 0.001).replace('model = "fake"', 'model = "fake"\nextra = { max_tokens = -1 }')
    comparison = Comparison(read_spec(write_spec(tmp_path / "s.toml", [row("good", 0.0), broken])), tmp_path)
    with pytest.raises(UsageError, match="broken fails every workload"):
        await comparison.run()
    assert all(server.pid is None for server in comparison.servers)


def test_a_workload_that_kills_a_server_is_left_out_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As an engine that dies of a seed: the server is started again, the other workload and server are measured."""
    fragile = row("fragile", 0.0).replace("--gap 0.0", "--gap 0.0 --dies-of-n")
    spec = write_spec(tmp_path / "s.toml", [row("good", 0.0), fragile])
    spec.write_text(spec.read_text().replace('["W1"]', '["W6", "W1"]').replace("rounds = 2", "rounds = 1"))
    result_path = tmp_path / "r.json"
    assert cli.main(["compare", str(spec), "--scale", "0", "--json", str(result_path), "--logs", str(tmp_path)]) == 1
    result = json.loads(result_path.read_text())
    assert [(run["server_name"], run["workload"]) for run in result["runs"]] == [
        ("good", "W6"), ("good", "W1"), ("fragile", "W1")
    ]  # fmt: skip
    assert not any(run["requests"]["failed"] for run in result["runs"])
    (failure,) = result["failures"]
    assert (failure["server"], failure["workload"]) == ("fragile", "W6")
    assert result["servers"]["fragile"]["restarts"] == 1
    assert "left out: fragile fails W6: error" in capsys.readouterr().out


def test_scale_and_rounds_fit_the_budget_and_are_the_largest() -> None:
    workloads = (Workload("a", 100, 4, fixed(1), fixed(1)), Workload("b", 10, 1, fixed(1), fixed(1)))
    estimates = {("x", "a"): 1.0, ("y", "a"): 2.0, ("x", "b"): 5.0, ("y", "b"): 5.0}

    def cost(scale: float) -> float:
        counts = {workload.name: workload.scaled(scale).num_sessions for workload in workloads}
        return 3 * sum(seconds * counts[name] for (_, name), seconds in estimates.items())

    assert fit_budget(cost(1.0), estimates, workloads, 3) == (1.0, 3)
    for budget in (1100.0, 600.0, 200.0):
        scale, rounds = fit_budget(budget, estimates, workloads, 3)
        assert rounds == 3
        assert cost(scale) <= budget < cost(scale + 0.06)
    for share, expected in ((0.9, 2), (0.5, 1)):
        scale, rounds = fit_budget(share * cost(0.0), estimates, workloads, 3)
        assert rounds == expected, "fewer rounds rather than a run without end"
        assert cost(scale) * rounds / 3 <= share * cost(0.0)
    scale, rounds = fit_budget(1.0, estimates, workloads, 3)
    assert (cost(scale), rounds) == (cost(0.0), 1), "too little for anything: the least there is"
    assert [workload.scaled(0.0).num_sessions for workload in workloads] == [4, 3], "all workers busy, and a median"


def test_ratios_are_taken_within_rounds() -> None:
    def run(server: str, number: int, rate: float) -> dict[str, object]:
        latency: dict[str, object] = {"ttft": {}, "tpot": {}, "itl": {}, "e2e": {}}
        rates = {"output_tokens_per_s": rate, "requests_per_s": 1.0}
        return {"workload": "W2", "server_name": server, "round": number, "rates": rates, "latency_s": latency}

    runs = [
        run("b", 0, 100.0),
        run("a", 0, 200.0),
        run("a", 1, 60.0),
        run("b", 1, 50.0),
        run("b", 2, 10.0),
        run("a", 2, 40.0),
    ]
    (row,) = [each for each in ratios(runs, "b") if each["server"] == "a" and each["metric"] == "output_tokens_per_s"]
    assert (row["ratio"], row["least"], row["greatest"]) == (2.0, 1.2, 4.0)
    assert not [each for each in ratios(runs, "b") if each["metric"] == "ttft_p50"], "not measured, not compared"
    two = ratios(runs[:4], "b")
    result = {
        "ratios": two, "baseline": "b", "servers": {}, "failures": [], "runs": [], "machine": {"cpu": "x", "cores": 2},
        "before": {"load": 0.0, "cores_busy": 0.0}, "scale": 1.0, "rounds": 2,
    }  # fmt: skip
    assert "130.00 x1.60 [1.20-2.00]" in comparison_table(result), "the median of two rounds lies between them"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("oops", "Cannot read"),
        ("speed = 3", "no field 'speed'"),
        ("", "at least one"),
        ('[[server]]\nname = "a"', "command or a url"),
        ('[[server]]\nname = "a"\nurl = "http://x"\ncolour = 1', "no field 'colour'"),
        ('baseline = "b"\n[[server]]\nname = "a"\nurl = "http://x"', "baseline 'b'"),
        ('workloads = ["W9"]\n[[server]]\nname = "a"\nurl = "http://x"', "no workload"),
    ],
)
def test_bad_specs(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_spec(path)


def test_the_shipped_specs_are_whole() -> None:
    for path in SPECS.glob("*.toml"):
        values = ["model_dir", "model_dir_no_eos", "gguf"]
        spec = read_spec(path, [f"{name}=/x" for name in values])
        for server in spec.servers:
            assert "{" not in " ".join(server.words(8100, spec.variables)), server.name
            assert "{" not in server.target(spec.variables).model
    with pytest.raises(UsageError):
        read_spec(SPECS / "peers.toml", ["nonsense"])
    alone = read_spec(SPECS / "peers.toml", only=["llama.cpp"])
    assert [server.name for server in alone.servers] == [alone.baseline] == ["llama.cpp"]
    changed = read_spec(SPECS / "peers.toml", workloads=["W2"], rounds=5, baseline="pagemill")
    assert ([workload.name for workload in changed.workloads], changed.rounds, changed.baseline) == (
        ["W2"], 5, "pagemill"
    )  # fmt: skip
    for wrong, message in (({"rounds": 0}, "one round"), ({"baseline": "nobody"}, "baseline 'nobody'")):
        with pytest.raises(UsageError, match=message):
            read_spec(SPECS / "peers.toml", **wrong)


def test_what_makes_figures_unfair_is_shown() -> None:
    def run(server: str, failed: int, short: int, peak: int) -> dict[str, object]:
        requests = {"failed": failed, "short": short}
        return {"server_name": server, "requests": requests, "server": {"rss_max_bytes": peak * 2**20}}

    runs = [run("a", 0, 2, 700), run("b", 9, 9, 9), run("a", 1, 3, 900)]
    shown = server_line("a", {"start_s": 2.0, "rss_ready_bytes": 600 * 2**20}, runs)
    assert shown == (
        "a: ready after 2.0 s, 600 MiB then, at most 900 MiB, 1 requests failed, 5 answers shorter than asked"
    )
    assert server_line("c", {"start_s": 2.0}, runs) == "c: ready after 2.0 s"


def test_durations() -> None:
    assert [duration(text) for text in ("90", "90s", "20m", "1.5h")] == [90, 90, 1200, 5400]
    with pytest.raises(ArgumentTypeError):
        duration("soon")


def test_cpu_marks() -> None:
    before = CpuMark.now()
    end = before.moment_s + 0.2
    while CpuMark.now().moment_s < end:
        pass
    assert 0.3 < CpuMark.now().cores_since(before) <= (os.cpu_count() or 1) * 1.2


def test_sigterm_ends_the_servers_it_started(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "s.toml", [row("one", 0.05), row("two", 0.05)])
    words = [sys.executable, "-m", "loadtest", "compare", str(spec), "--logs", str(tmp_path)]
    with subprocess.Popen(words, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while "warming" not in process.stderr.readline():
            pass
        servers = [pid for pid in process_tree(process.pid) if pid != process.pid]
        assert len(servers) == 2
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    assert not any(alive(pid) for pid in servers)
