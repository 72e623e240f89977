"""Several servers, the same requests, round by round.

All servers are started first; only the one being measured runs, the others are stopped (SIGSTOP). Every round uses
fresh requests (another seed), the same for all; the order of the servers rotates. Ratios are taken within a round,
so that what the machine does to both cancels, and are given with their spread over the rounds.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from loadtest.lengths import UsageError
from loadtest.machine import describe_machine, look_around, resident_bytes
from loadtest.measure import Plan, measure
from loadtest.prompts import prompt_source
from loadtest.servers import Server, ServerSpec, server_spec
from loadtest.table import error_lines
from loadtest.transport import RawTransport
from loadtest.workloads import Workload, named_workload

METRICS: Mapping[str, tuple[str, ...]] = {  # name -> path in a result; latencies are better when small
    "output_tokens_per_s": ("rates", "output_tokens_per_s"),
    "requests_per_s": ("rates", "requests_per_s"),
    "ttft_p50": ("latency_s", "ttft", "p50"),
    "tpot_p50": ("latency_s", "tpot", "p50"),
    "itl_p99": ("latency_s", "itl", "p99"),
    "e2e_p50": ("latency_s", "e2e", "p50"),
}


@dataclass(frozen=True, slots=True)
class CompareSpec:
    """baseline: the server that ratios divide by. workloads: names, W1..W6 by default."""

    servers: tuple[ServerSpec, ...]
    baseline: str
    workloads: tuple[Workload, ...]
    rounds: int = 3
    seed: int = 0
    pause_others: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)


def read_spec(
    path: Path,
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    *,
    workloads: Sequence[str] = (),
    rounds: int | None = None,
    baseline: str | None = None,
) -> CompareSpec:
    """overrides: NAME=VALUE for the spec's variables. only: names of servers to keep. workloads, rounds, baseline: in
    place of the spec's. Raises UsageError."""
    table = _read_table(path)
    given = {"workloads": list(workloads) or None, "rounds": rounds, "baseline": baseline}
    table |= {key: value for key, value in given.items() if value is not None}
    variables = dict(table.get("variables", {}))
    for text in overrides:
        name, separator, value = text.partition("=")
        if not separator:
            raise UsageError(f"--set wants NAME=VALUE, got {text!r}.")
        variables[name] = value
    servers = tuple(server_spec(row) for row in table.get("server", ()))
    servers = tuple(server for server in servers if not only or server.name in only)
    names = [server.name for server in servers]
    chosen = table.get("baseline", names[0] if names else "")
    if only and baseline is None and names and chosen not in names:
        chosen = names[0]
    if len(set(names)) < len(names) or not names:
        raise UsageError("A spec needs at least one [[server]], and their names must differ.")
    if chosen not in names:
        raise UsageError(f"The baseline {chosen!r} is not among the servers {', '.join(names)}.")
    if table.get("rounds", 3) < 1:
        raise UsageError("A comparison needs at least one round.")
    shapes = tuple(named_workload(name) for name in table.get("workloads", [f"W{k}" for k in range(1, 7)]))
    return CompareSpec(
        servers,
        chosen,
        shapes,
        table.get("rounds", 3),
        table.get("seed", 0),
        table.get("pause_others", True),
        variables,
    )


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read the spec {path}: {error}.") from None
    known = {"server", "baseline", "workloads", "rounds", "seed", "pause_others", "variables"}
    if unknown := set(table) - known:
        raise UsageError(f"A spec has no field {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}.")
    return table


def fit_budget(
    budget_s: float, estimates: Mapping[tuple[str, str], float], workloads: Sequence[Workload], rounds: int
) -> tuple[float, int]:
    """The scale of the request counts and the rounds that fit into budget_s: as many rounds as were asked for, at the
    largest scale <= 1; fewer rounds (at least one) only where even the smallest scale is too much.

    estimates: (server, workload) -> seconds per session. A workload never has fewer sessions than workers."""

    def round_s(scale: float) -> float:
        return sum(
            seconds * workload.scaled(scale).num_sessions
            for (_, name), seconds in estimates.items()
            for workload in workloads
            if workload.name == name
        )

    least_s = round_s(0.0)
    rounds = max(1, min(rounds, int(budget_s / least_s))) if least_s > 0 else rounds
    if rounds * round_s(1.0) <= budget_s:
        return 1.0, rounds
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if rounds * round_s(middle) <= budget_s else (low, middle)
    return low, rounds


class Comparison:
    """One run of a spec. `result` is JSON data and grows as the run goes on."""

    def __init__(self, spec: CompareSpec, log_dir: Path, *, scale: float = 1.0) -> None:
        """scale: of the request counts, as long as no budget chooses another."""
        self.spec = spec
        self.servers = [Server(server) for server in spec.servers]
        self.result: dict[str, Any] = {
            "kind": "compare",
            "machine": describe_machine(), "baseline": spec.baseline, "rounds": spec.rounds, "seed": spec.seed,
            "scale": scale, "servers": {}, "failures": [], "runs": [], "ratios": [],
        }  # fmt: skip
        self._log_dir = log_dir

    async def run(self, budget_s: float | None = None) -> dict[str, Any]:
        """Starts, warms, measures, ends. budget_s: for everything, starts included; it chooses the scale."""
        begun = perf_counter()
        try:
            self.result["before"] = await look_around()
            for server in self.servers:
                await self._start(server)
            estimates: dict[tuple[str, str], float] = {}
            for server in self.servers:
                estimates |= await self._warm(server, calibrate=budget_s is not None)
            if budget_s is not None:
                self._fit(budget_s, budget_s - (perf_counter() - begun), estimates)
            for round_number in range(self.result["rounds"]):
                await self._round(round_number)
        finally:
            for server in self.servers:
                await server.end()
            self.result["ratios"] = ratios(self.result["runs"], self.spec.baseline)  # of an interrupted run too
            self.result["wall_s"] = perf_counter() - begun
        return self.result

    def _fit(self, budget_s: float, left_s: float, estimates: Mapping[tuple[str, str], float]) -> None:
        scale, rounds = fit_budget(left_s, estimates, self.spec.workloads, self.spec.rounds)
        self.result |= {"budget_s": budget_s, "scale": scale, "rounds": rounds}
        counts = ", ".join(f"{each.name} {each.scaled(scale).num_sessions}" for each in self.spec.workloads)
        _say(f"{left_s:.0f} s left of the budget: {rounds} rounds, request counts x{scale:.3f} ({counts})")
        if rounds < self.spec.rounds:
            _say(f"too little for {self.spec.rounds} rounds even of the fewest requests that keep all workers busy")

    async def _start(self, server: Server) -> None:
        _say(f"starting {server.spec.name}")
        await server.start(self.spec.variables, self._log(server))
        row: dict[str, Any] = {"start_s": server.start_s, "command": server.spec.command or server.url}
        if server.pid is not None:
            row["rss_ready_bytes"] = resident_bytes(server.pid)
        self.result["servers"][server.spec.name] = row
        if self.spec.pause_others:
            server.pause()

    async def _warm(self, server: Server, *, calibrate: bool) -> dict[tuple[str, str], float]:
        """One small run per workload. Returns seconds per session (from full-length outputs if calibrate). What a
        server cannot do is noted and left out. Raises UsageError if that is everything."""
        estimates = {}
        for workload in self.spec.workloads:
            _say(f"warming {server.spec.name} with {workload.name}")
            small = workload.scaled(0.0)
            began = perf_counter()
            result = await self._measure(server, small, self.spec.seed + 5_000_011, warm=not calibrate)
            if not result["requests"]["completed"]:
                failure = {"server": server.spec.name, "workload": workload.name, "errors": error_lines(result)}
                self.result["failures"].append(failure)
                _say(f"left out: {failure_line(failure)}")
                continue
            estimates[server.spec.name, workload.name] = (perf_counter() - began) / small.num_sessions
        if not estimates:
            raise UsageError(f"Server {server.spec.name} fails every workload; see {self._log(server)}.")
        return estimates

    async def _round(self, number: int) -> None:
        shift = number % len(self.servers)
        left_out = {(row["server"], row["workload"]) for row in self.result["failures"]}
        for workload in self.spec.workloads:
            for server in self.servers[shift:] + self.servers[:shift]:
                if (server.spec.name, workload.name) in left_out:
                    continue
                scaled = workload.scaled(self.result["scale"])
                result = await self._measure(server, scaled, self.spec.seed + number)
                result |= {"server_name": server.spec.name, "round": number}
                self.result["runs"].append(result)
                rates, turn = result["rates"], f"round {number + 1}/{self.result['rounds']}"
                shown = f"{rates['output_tokens_per_s']:.1f} tok/s, {rates['requests_per_s']:.2f} requests/s"
                _say(f"{turn} {workload.name} {server.spec.name}: {shown}")

    async def _measure(self, server: Server, workload: Workload, seed: int, *, warm: bool = False) -> dict[str, Any]:
        server.resume()
        await self._revive(server)
        source = prompt_source(server.spec.prompts)
        split = workload.n if server.spec.expand_n else 1  # so many requests stand for one
        if split > 1:
            workload = workload.without_n()
        sessions = workload.build(seed, source)
        description = {
            "workload": workload.name, "url": server.url, "loop": f"closed, concurrency {workload.concurrency}",
            "seed": seed, "sessions": workload.num_sessions,
        }  # fmt: skip
        plan = Plan(sessions[:2] if warm else sessions, workload.concurrency, description)
        transport, target = RawTransport(server.url), server.spec.target(self.spec.variables)
        try:
            result = await measure(transport, target, plan, pid=server.pid, progress=True)
            result["rates"]["requests_per_s"] /= split
            return result
        finally:
            await transport.close()
            if self.spec.pause_others:
                server.pause()

    async def _revive(self, server: Server) -> None:
        """A server of ours that died of the run before is started again, and that is noted."""
        if server.pid is None or await server.answers():
            return
        _say(f"{server.spec.name} is dead; starting it again")
        await server.end()
        await server.start(self.spec.variables, self._log(server))
        row = self.result["servers"][server.spec.name]
        row["restarts"] = row.get("restarts", 0) + 1

    def _log(self, server: Server) -> Path:
        return self._log_dir / f"{server.spec.name}.log"


def failure_line(failure: Mapping[str, Any]) -> str:
    return f"{failure['server']} fails {failure['workload']}: {'; '.join(failure['errors'])}"


def ratios(runs: Sequence[Mapping[str, Any]], baseline: str) -> list[dict[str, Any]]:
    """Per workload, server and metric: the median, least and greatest over rounds of value / baseline's value."""
    rows = []
    workloads = list(dict.fromkeys(run["workload"] for run in runs))
    for workload in workloads:
        mine = [run for run in runs if run["workload"] == workload]
        for server in dict.fromkeys(run["server_name"] for run in mine):
            for metric in METRICS:
                values = [run_value(run, metric) for run in mine if run["server_name"] == server]
                base = [run_value(run, metric) for run in mine if run["server_name"] == baseline]
                pairs = [(a, b) for a, b in zip(values, base, strict=False) if a is not None and b]
                if not pairs:
                    continue
                quotients = [a / b for a, b in pairs]
                rows.append(
                    {
                        "workload": workload, "server": server, "metric": metric, "values": values,
                        "ratio": median(quotients), "least": min(quotients), "greatest": max(quotients),
                    }
                )  # fmt: skip
    return rows


def run_value(run: Mapping[str, Any], metric: str) -> float | None:
    value: Any = run
    for key in METRICS[metric]:
        value = value.get(key)
        if value is None:
            return None
    return float(value)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
