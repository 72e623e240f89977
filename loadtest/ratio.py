"""`loadtest ratio`: served throughput of this server over plain `transformers.generate`, under one KV budget.

Both get the same requests and threads, one after the other at every point, the idle one stopped. generate gets them
sorted by length, in the largest padded batches (at most `concurrency`) whose static KV, reserved to the longest prompt
plus the longest output of the batch for each row, fits the budget. Only useful tokens count: those asked for, not the
padding and not what a row computes while it waits for the longest of its batch.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

from loadtest.lengths import Lengths, UsageError, lognormal_between
from loadtest.load import LoadState, run_load
from loadtest.machine import CpuMark, cpu_seconds, describe_machine, look_around
from loadtest.measure import warm_up
from loadtest.padded import Baseline, Batch, plan_batches, sample_batches
from loadtest.progress import load_progress, progress_line
from loadtest.prompts import TokenIds
from loadtest.servers import Server, ServerSpec
from loadtest.table import grid
from loadtest.transport import RawTransport
from loadtest.workloads import Session, Workload

TOKEN_BYTES = 30 * 2 * 3 * 64 * 2  # SmolLM2-135M in bfloat16: layers, K and V, KV heads, head size, bytes
COMMAND = (
    "{python} -m server serve {model} --served-model-name model --dtype bfloat16 --kv-cache-memory {memory} "
    "--num-threads {threads} --host 127.0.0.1 --port {port}"
)
LENGTHS: dict[str, tuple[Lengths, Lengths]] = {
    "short": (lognormal_between(16, 128), lognormal_between(8, 64)),
    "medium": (lognormal_between(32, 512), lognormal_between(16, 256)),
    "long": (lognormal_between(128, 1536), lognormal_between(32, 512)),
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "ratio", help="served throughput over plain generate, one KV budget", allow_abbrev=False
    )
    parser.add_argument("model", help="model folder or GGUF file, for both")
    parser.add_argument("--memory-mib", type=int, default=64, help="KV budget of both")
    parser.add_argument("--token-bytes", type=int, default=TOKEN_BYTES)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--concurrency", default="1,4,16,64")
    parser.add_argument("--lengths", default="short,medium,long", help=f"of {', '.join(LENGTHS)}")
    parser.add_argument("--requests", type=int, help="per point; default: twice the concurrency, 8 to 64")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--max-batches", type=int, help="generate runs an even sample of its batches; default: all")
    parser.add_argument("--cache", choices=("static", "dynamic"), default="static", help="of generate")
    parser.add_argument("--command", dest="server_command", default=COMMAND)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(command=command)


async def command(arguments: argparse.Namespace) -> int:
    """Exit code 1 if a served request failed."""
    points, failed = [], 0
    variables = {
        "python": sys.executable, "model": arguments.model, "threads": str(arguments.threads),
        "memory": f"{arguments.memory_mib}MiB",
    }  # fmt: skip
    check_arguments(arguments)
    server = Server(ServerSpec("served", arguments.server_command, ready="/health"))
    log = Path(tempfile.mkdtemp(prefix="loadtest-ratio-")) / "server.log"
    before = await look_around()
    print(f"starting both; the server's log: {log}", file=sys.stderr)
    await server.start(variables, log)
    server.pause()
    baseline = None
    try:
        baseline = await Baseline.start(arguments.model, arguments.threads, arguments.cache)
        for name in arguments.lengths.split(","):
            for concurrency in map(int, arguments.concurrency.split(",")):
                point = await measure_point(server, baseline, arguments, name, concurrency)
                failed += point["failed"]
                points.append(point)
                print(point_text(point), file=sys.stderr, flush=True)
    finally:
        await server.end()
        if baseline is not None:
            await baseline.end()
        result = {
            "kind": "ratio", "machine": describe_machine(), "before": before, "memory_mib": arguments.memory_mib,
            "threads": arguments.threads, "cache": arguments.cache, "rounds": arguments.rounds,
            "max_batches": arguments.max_batches, "points": points, "table": ratio_table(points),
        }  # fmt: skip
        if arguments.json is not None:  # an interrupted run keeps its points
            arguments.json.write_text(json.dumps(result, indent=1))
    print(result["table"])
    print(
        f"\nKV budget {arguments.memory_mib} MiB each, {arguments.threads} threads, load before {before['load']:.2f}"
    )
    return int(failed > 0)


def check_arguments(arguments: argparse.Namespace) -> None:
    """Raises UsageError."""
    for name in arguments.lengths.split(","):
        if name not in LENGTHS:
            raise UsageError(f"There are no lengths {name!r}; there are {', '.join(LENGTHS)}.")
    if arguments.rounds < 1 or (arguments.max_batches is not None and arguments.max_batches < 1):
        raise UsageError("Rounds and batches must be at least 1.")


async def measure_point(
    server: Server, baseline: Baseline, arguments: argparse.Namespace, name: str, concurrency: int
) -> dict[str, Any]:
    """Both sides, `rounds` times; the ratio is the median over rounds."""
    count = arguments.requests or min(64, max(8, 2 * concurrency))
    workload = Workload(name, count, concurrency, *LENGTHS[name])
    kv_tokens = arguments.memory_mib * 2**20 // arguments.token_bytes
    rounds: list[tuple[float, float]] = []
    failed, all_batches = 0, list[Batch]()
    mark, used = CpuMark.now(), own_cpu_seconds(server, baseline)
    for number in range(arguments.rounds):
        sessions = workload.build(arguments.seed + number, TokenIds())
        batches = plan_batches([session.turns[0] for session in sessions], concurrency, kv_tokens)
        all_batches += batches
        label = f"{name} x{concurrency}, round {number + 1}/{arguments.rounds}"
        await warm_server(server, workload.build(arguments.seed + 10**6, TokenIds())[:2])
        served, failures = await served_rate(server, sessions, concurrency, label)
        failed += failures
        rounds.append(
            (served, await generate_rate(baseline, sample_batches(batches, arguments.max_batches, number), label))
        )
    end = CpuMark.now()
    used = (own_cpu_seconds(server, baseline) - used) / (end.moment_s - mark.moment_s)
    rows = [len(batch.requests) for batch in all_batches]
    useful = sum(batch.useful_tokens for batch in all_batches)
    computed = sum(len(batch.requests) * batch.max_new_tokens for batch in all_batches)
    return {
        "lengths": name, "concurrency": concurrency, "requests": count, "failed": failed,
        "served_tokens_per_s": median(served for served, _ in rounds),
        "generate_tokens_per_s": median(generated for _, generated in rounds),
        "ratio": median(served / generated for served, generated in rounds),
        "ratios": [served / generated for served, generated in rounds],
        "generate_rows": sum(rows) / len(rows), "generate_useful": useful / computed,
        "cores_others": max(0.0, end.cores_since(mark) - used),
    }  # fmt: skip


async def served_rate(server: Server, sessions: Sequence[Session], concurrency: int, label: str) -> tuple[float, int]:
    """Output tokens per second, and the requests that failed."""
    transport, state = RawTransport(server.url), LoadState()
    target = server.spec.target({})
    server.resume()
    async with progress_line(load_progress(f"{label}, served", state)):
        result = await run_load(transport, target, sessions, concurrency=concurrency, state=state)
    await transport.close()
    server.pause()
    tokens = sum(record.output_tokens for record in result.records)
    return tokens / result.cost.wall_s, sum(bool(record.error) for record in result.records)


async def warm_server(server: Server, sessions: Sequence[Session]) -> None:
    transport = RawTransport(server.url)
    server.resume()
    await warm_up(transport, server.spec.target({}), sessions)
    await transport.close()


async def generate_rate(baseline: Baseline, batches: Sequence[Batch], label: str) -> float:
    """Useful output tokens per second."""
    begun = perf_counter()
    async with progress_line(lambda: f"{label}, generate, {perf_counter() - begun:.0f} s"):
        seconds = await baseline.seconds(batches)
    return sum(batch.useful_tokens for batch in batches) / seconds


def own_cpu_seconds(server: Server, baseline: Baseline) -> float:
    """CPU time of the client and both sides so far."""
    pids = [pid for pid in (server.pid, baseline.pid) if pid is not None]
    return process_time() + sum(cpu_seconds(pid) for pid in pids)


def point_text(point: dict[str, Any]) -> str:
    return (
        f"{point['lengths']} x{point['concurrency']}: served {point['served_tokens_per_s']:.1f} tok/s, generate "
        f"{point['generate_tokens_per_s']:.1f}, ratio {point['ratio']:.2f}"
    )


def ratio_table(points: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            "lengths",
            "concurrency",
            "served tok/s",
            "generate tok/s",
            "ratio",
            "generate's rows",
            "useful",
            "others' cores",
        ]
    ]
    for point in points:
        rates = [f"{point[f'{side}_tokens_per_s']:.1f}" for side in ("served", "generate")]
        spread = f" [{min(point['ratios']):.2f}-{max(point['ratios']):.2f}]" if len(point["ratios"]) > 1 else ""
        ends = [f"{point['ratio']:.2f}{spread}", f"{point['generate_rows']:.1f}", f"{point['generate_useful']:.0%}"]
        ends.append(f"{point['cores_others']:.2f}")
        rows.append([point["lengths"], str(point["concurrency"]), *rates, *ends])
    return grid(rows) + "\n\nThe article beside this: 2-4x over earlier servers, up to 24x over transformers."
