"""Request rate from idle to past saturation: where does the server stop keeping up, and what does latency cost there.

First a closed burst measures about what the server can complete; the open-loop rates are fractions of that. A server
that keeps up with the last of them gets higher ones until it does not: a burst ends with few requests in flight, and
says too little of a server that batches well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.arrivals import KINDS, arrival_times
from loadtest.cli_run import (
    add_shape_arguments,
    add_target_arguments,
    open_target,
    open_transport,
    shaped_workload,
    source_of,
)
from loadtest.lengths import UsageError
from loadtest.machine import describe_machine
from loadtest.measure import Plan, measure
from loadtest.table import grid

FRACTIONS = (0.1, 0.25, 0.4, 0.55, 0.7, 0.8, 0.9, 1.0, 1.15, 1.4)
MIN_REQUESTS = 12  # per rate
STEP_UP, MAX_STEPS_UP = 1.3, 6  # beyond the fractions
GROWTH_LIMIT = 0.1  # seconds that latency grows per second: the share of the load that piles up


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("sweep", help="request rates from idle to past saturation", allow_abbrev=False)
    add_target_arguments(parser)
    add_shape_arguments(parser)
    parser.add_argument("--rates", help="requests per second, comma-separated; default: fractions of the capacity")
    parser.add_argument("--arrivals", choices=KINDS, default="poisson")
    parser.add_argument("--point-seconds", type=float, default=20.0, help="arrivals last about this long per rate")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--no-progress", action="store_true")
    parser.set_defaults(command=command)


async def command(arguments: argparse.Namespace) -> int:
    """Exit code 1 if no request succeeded."""
    workload = shaped_workload(arguments)
    source = source_of(arguments, workload)
    transport = open_transport(arguments)
    try:
        target = await open_target(transport, arguments)

        async def point(rate: float | None, count: int, seed: int) -> dict[str, Any]:
            shape = replace(workload, num_sessions=count)
            times = arrival_times(arguments.arrivals, rate, count, seed) if rate is not None else ()
            loop = f"open, {arguments.arrivals} {rate:.3g}/s" if rate is not None else "closed"
            about = {"workload": shape.name, "url": arguments.url, "seed": seed, "loop": loop, "rate": rate}
            concurrency = shape.concurrency if rate is None else None
            plan = Plan(shape.build(seed, source, times), concurrency, about)
            result = await measure(transport, target, plan, pid=arguments.pid, progress=not arguments.no_progress)
            result["latency_growth"] = latency_growth(result.pop("moments"))
            return result

        burst = await point(None, max(workload.concurrency * 2, MIN_REQUESTS), arguments.seed)
        capacity = burst["rates"]["requests_per_s"]
        if not capacity:
            raise UsageError(f"No request succeeded: {burst['errors']}.")
        rates = parse_rates(arguments.rates) if arguments.rates else [capacity * share for share in FRACTIONS]
        most = len(rates) + (0 if arguments.rates else MAX_STEPS_UP)
        points: list[dict[str, Any]] = []
        while (rate := next_rate(rates, points, most)) is not None:
            number = len(points)
            count = max(MIN_REQUESTS, round(rate * arguments.point_seconds))
            points.append(await point(rate, count, arguments.seed + 1 + number))
            print(f"{rate:.2f} requests/s offered: {point_line(points[-1])}", file=sys.stderr, flush=True)
    finally:
        await transport.close()
    result = {
        "kind": "sweep", "workload": workload.name, "url": arguments.url, "model": target.model,
        "machine_is": describe_machine(), "capacity_requests_per_s": capacity, "points": points, "knee": knee(points),
    }  # fmt: skip
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    print(sweep_table(result))
    return int(not any(point["requests"]["completed"] for point in points))


def parse_rates(text: str) -> list[float]:
    """Raises UsageError unless they are positive numbers."""
    try:
        rates = sorted(float(part) for part in text.split(","))
    except ValueError:
        rates = []
    if not rates or rates[0] <= 0:
        raise UsageError(f"--rates wants positive numbers separated by commas, got {text!r}.")
    return rates


def next_rate(rates: Sequence[float], points: Sequence[Mapping[str, Any]], most: int) -> float | None:
    """The rates in turn, and beyond the last one higher ones while the server keeps up, `most` in all."""
    if len(points) < len(rates):
        return rates[len(points)]
    if len(points) >= most or points[-1]["latency_growth"] >= GROWTH_LIMIT or not points[-1]["requests"]["completed"]:
        return None
    return float(points[-1]["rate"] * STEP_UP)


def latency_growth(moments: Sequence[tuple[float, float]]) -> float:
    """Slope of E2E over arrival time, by least squares. moments: (arrival, E2E) in seconds.

    A server that keeps up has about 0. One that gets rho times what it can do falls behind by rho - 1 seconds every
    second, and that is the slope."""
    if len(moments) < 3:
        return 0.0
    mean_x = sum(x for x, _ in moments) / len(moments)
    mean_y = sum(y for _, y in moments) / len(moments)
    spread = sum((x - mean_x) ** 2 for x, _ in moments)
    return sum((x - mean_x) * (y - mean_y) for x, y in moments) / spread if spread > 0 else 0.0


def knee(points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Where more load begins to cost more latency than it brings throughput: the point farthest below the line from
    the first point to the one of the greatest throughput, both axes scaled to 0..1 (latency: p90 of E2E).
    sustained: the highest offered rate that does not pile up."""
    curve = [
        (point["rate"], point["rates"]["requests_per_s"], point["latency_s"]["e2e"]["p90"])
        for point in points
        if point["requests"]["completed"]
    ]
    kept_up = [point["rate"] for point in points if point["latency_growth"] < GROWTH_LIMIT]
    result: dict[str, Any] = {
        "rate": None,
        "sustained": max(kept_up, default=None),
        "saturated_requests_per_s": max((done for _, done, _ in curve), default=None),
    }
    if len(curve) < 3:
        return result
    first, last = curve[0], max(curve, key=lambda each: each[1])
    if last[1] <= first[1] or last[2] <= first[2]:
        return result
    candidates = [each for each in curve if first[1] <= each[1] <= last[1]]

    def below_the_line(each: tuple[float, float, float]) -> float:
        throughput, latency = ((each[axis] - first[axis]) / (last[axis] - first[axis]) for axis in (1, 2))
        return float(throughput - latency)

    best = max(candidates, key=below_the_line)
    return result | {"rate": best[0], "requests_per_s": best[1], "e2e_p90_s": best[2]}


def point_line(point: Mapping[str, Any]) -> str:
    rates, e2e = point["rates"], point["latency_s"]["e2e"]
    return f"{rates['output_tokens_per_s']:.0f} tok/s, E2E p90 {e2e.get('p90', 0) * 1000:.0f} ms"


def sweep_table(result: Mapping[str, Any]) -> str:
    rows = [["offered/s", "done/s", "output tok/s", "TTFT p50", "TTFT p90", "TPOT p50", "E2E p90", "growth", "failed"]]
    for point in result["points"]:
        latency = point["latency_s"]
        columns = (("ttft", "p50"), ("ttft", "p90"), ("tpot", "p50"), ("e2e", "p90"))
        cells = [f"{latency[key].get(column, 0.0) * 1000:.1f} ms" for key, column in columns]
        rates = point["rates"]
        numbers = [f"{rates['requests_per_s']:.2f}", f"{rates['output_tokens_per_s']:.1f}"]
        ends = [f"{point['latency_growth']:+.2f}", str(point["requests"]["failed"])]
        rows.append([f"{point['rate']:.2f}", *numbers, *cells, *ends])
    found = result["knee"]
    lines = [f"{result['workload']} on {result['url']}, model {result['model']}", grid(rows), ""]
    if found["rate"] is not None:
        latency = f"{found['e2e_p90_s'] * 1000:.0f} ms"
        lines.append(f"knee       {found['rate']:.2f} requests/s offered, E2E p90 {latency} there")
    if found["sustained"] is not None:
        lines.append(f"sustained  {found['sustained']:.2f} requests/s: the highest rate at which nothing piles up")
    lines.append(f"capacity   {result['capacity_requests_per_s']:.2f} requests/s in a closed burst")
    return "\n".join(lines)
