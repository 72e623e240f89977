"""`loadtest compare`: several servers from a spec file, interleaved."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from loadtest.compare import Comparison, failure_line, read_spec
from loadtest.lengths import UsageError
from loadtest.table import grid

SHOWN = ("output_tokens_per_s", "requests_per_s", "ttft_p50", "tpot_p50")  # the result file holds them all
SPECS = Path(__file__).parent / "specs"


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("compare", help="several servers, interleaved round by round", allow_abbrev=False)
    parser.add_argument("spec", help="a TOML file, or the name of one in loadtest/specs")
    parser.add_argument("--budget", type=duration, help="time for all of it: 60m, 1h, 300s; scales request counts")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable of the spec")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="of the request counts, without a budget; 0: the least"
    )
    parser.add_argument("--only", action="append", default=[], help="a server to keep; repeatable")
    parser.add_argument("--workload", action="append", default=[], help="instead of the spec's; repeatable")
    parser.add_argument("--rounds", type=int, help="instead of the spec's")
    parser.add_argument("--baseline", help="the server that ratios divide by, instead of the spec's")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--logs", type=Path, help="folder for the servers' logs")
    parser.set_defaults(command=command)


def duration(text: str) -> float:
    """Seconds from 90, 90s, 20m, 1.5h. Raises argparse's error."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"want a time such as 90s, 20m or 1h, got {text!r}")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def find_spec(text: str) -> Path:
    """A file, or the name of a shipped one. Raises UsageError."""
    for path in (Path(text), SPECS / f"{text}.toml"):
        if path.is_file():
            return path
    names = ", ".join(sorted(spec.stem for spec in SPECS.glob("*.toml")))
    raise UsageError(f"There is no spec {text!r}; shipped are {names}.")


async def command(arguments: argparse.Namespace) -> int:
    """Exit code 1 if any request of any server failed, or a whole workload."""
    spec = read_spec(
        find_spec(arguments.spec), arguments.set, arguments.only,
        workloads=arguments.workload, rounds=arguments.rounds, baseline=arguments.baseline,
    )  # fmt: skip
    logs = arguments.logs or Path(tempfile.mkdtemp(prefix="loadtest-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    comparison = Comparison(spec, logs, scale=arguments.scale)
    try:
        await comparison.run(arguments.budget)
    finally:
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(comparison.result, indent=1))
    print(comparison_table(comparison.result))
    failed = any(run["requests"]["failed"] for run in comparison.result["runs"])
    return int(failed or bool(comparison.result["failures"]))


def comparison_table(result: Mapping[str, Any]) -> str:
    """Medians over rounds, and the ratio to the baseline as median [least-greatest]."""
    rows = [["workload", "server", *SHOWN]]
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["ratios"]:
        middle = median(value for value in row["values"] if value is not None)
        shown = f"{middle:.2f}" if row["metric"].endswith("_per_s") else f"{middle * 1000:.1f} ms"
        ratio = f" x{row['ratio']:.2f} [{row['least']:.2f}-{row['greatest']:.2f}]"
        is_baseline = row["server"] == result["baseline"]
        cells.setdefault((row["workload"], row["server"]), {})[row["metric"]] = shown + ("" if is_baseline else ratio)
    rows += [[*key, *(values.get(metric, "-") for metric in SHOWN)] for key, values in cells.items()]
    servers = [server_line(name, row, result["runs"]) for name, row in result["servers"].items()]
    servers += [f"left out: {failure_line(failure)}" for failure in result["failures"]]
    before = result["before"]
    others = [run["machine"]["cores_others"] for run in result["runs"] if "cores_others" in run["machine"]]
    machine = (
        f"machine: {result['machine']['cpu']}, {result['machine']['cores']} cores; before: load {before['load']:.2f}, "
        f"{before['cores_busy']:.2f} cores busy"
        + (f"; during: others took up to {max(others):.2f} cores" if others else "")
    )
    scale = f"request counts x{result['scale']:.3f}, {result['rounds']} rounds, baseline {result['baseline']}"
    return "\n".join([grid(rows), "", *servers, machine, scale])


def server_line(name: str, row: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> str:
    """Start, memory, and what would make its figures unfair: failed requests, answers shorter than asked."""
    parts = [f"{name}: ready after {row['start_s']:.1f} s"]
    if "rss_ready_bytes" in row:
        parts.append(f"{row['rss_ready_bytes'] / 2**20:.0f} MiB then")
    mine = [run for run in runs if run["server_name"] == name]
    peaks = [run["server"]["rss_max_bytes"] for run in mine if "rss_max_bytes" in run["server"]]
    if peaks:
        parts.append(f"at most {max(peaks) / 2**20:.0f} MiB")
    if "restarts" in row:
        parts.append(f"died and was started again {row['restarts']} times")
    for kind, words in (("failed", "requests failed"), ("short", "answers shorter than asked")):
        if count := sum(run["requests"][kind] for run in mine):
            parts.append(f"{count} {words}")
    return ", ".join(parts)
