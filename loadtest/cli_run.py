"""`loadtest run`: one workload against one server."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from loadtest.arrivals import KINDS, arrival_times
from loadtest.client import Target
from loadtest.lengths import Lengths, UsageError, fixed, parse_lengths
from loadtest.machine import describe_machine
from loadtest.measure import Plan, measure
from loadtest.prompts import PromptSource, prompt_source
from loadtest.summary import parse_objective
from loadtest.table import result_table
from loadtest.trace import read_trace, trace_sessions
from loadtest.transport import RawTransport, Transport, TransportError
from loadtest.transport_httpx import HttpxTransport
from loadtest.workloads import NAMED, Workload, named_workload


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("run", help="one workload against one server", allow_abbrev=False)
    add_target_arguments(parser)
    add_shape_arguments(parser)
    group = parser.add_argument_group("arrivals (default: closed loop)")
    group.add_argument("--rate", type=float, help="open loop: requests per second")
    group.add_argument("--arrivals", choices=KINDS, default="poisson")
    group.add_argument("--burstiness", type=float, default=0.25, help="shape of the gamma gaps of bursty arrivals")
    group.add_argument("--trace", type=Path, help="open loop: replay this file")
    group.add_argument("--time-scale", type=float, default=1.0, help="replay this many times as fast")
    group = parser.add_argument_group("measuring")
    group.add_argument("--warmup", type=int, default=2, help="requests sent first and not counted")
    group.add_argument("--slo", action="append", default=[], metavar="KEY:MS", help="ttft, tpot, itl, e2e; repeatable")
    group.add_argument("--pid", type=int, help="the server's process: its memory and CPU time are reported")
    group.add_argument("--sample-interval", type=float, default=1.0, help="seconds between looks at /metrics")
    group.add_argument("--json", type=Path, help="write the result here, every request included")
    group.add_argument("--no-progress", action="store_true")
    parser.set_defaults(command=command)


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", default="http://127.0.0.1:8000")
    group.add_argument("--model", help="default: the first of /v1/models")
    group.add_argument("--endpoint", choices=("completions", "chat"), default="completions")
    group.add_argument("--api-key", default="")
    group.add_argument("--no-stream", action="store_true")
    group.add_argument("--no-ignore-eos", action="store_true", help="let outputs end where the model ends them")
    group.add_argument("--extra-body", type=json.loads, default={}, metavar="JSON", help="further request fields")
    group.add_argument("--omit", action="append", default=[], help="a request field the server does not take")
    group.add_argument("--timeout", type=float, default=600.0, help="seconds per request")
    group.add_argument("--transport", choices=("raw", "httpx"), default="raw")


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", default="W2", help=f"one of {', '.join(NAMED)}; the flags below change it")
    group.add_argument("--requests", type=int, help="sessions, of one request each unless there are turns")
    group.add_argument("--concurrency", type=int)
    group.add_argument("--prompt-len", help="fixed:N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA:LOW:HIGH, sharegpt-in")
    group.add_argument("--output-len")
    group.add_argument("--prefix-len", type=int, help="tokens shared by all prompts of a prefix group")
    group.add_argument("--prefix-groups", type=int)
    group.add_argument("--turns", help="requests of one conversation: a length distribution")
    group.add_argument("--think", type=float, help="seconds between turns")
    group.add_argument("--n", type=int)
    group.add_argument("--temperature", type=float)
    group.add_argument("--prompts", help="ids (default), ids:LOW:HIGH or text (default of chats and conversations)")
    group.add_argument("--seed", type=int, default=0)


def shaped_workload(arguments: argparse.Namespace) -> Workload:
    """The named workload with what the flags change. Raises UsageError."""
    workload = named_workload(arguments.workload)
    lengths: dict[str, Lengths] = {
        name: parse_lengths(text)
        for name, text in (
            ("prompt_len", arguments.prompt_len), ("output_len", arguments.output_len), ("turns", arguments.turns)
        )
        if text is not None
    }  # fmt: skip
    numbers = {
        "num_sessions": arguments.requests, "concurrency": arguments.concurrency, "prefix_len": arguments.prefix_len,
        "prefix_groups": arguments.prefix_groups, "think_s": arguments.think, "n": arguments.n,
        "temperature": arguments.temperature,
    }  # fmt: skip
    changes: dict[str, Any] = lengths | {key: value for key, value in numbers.items() if value is not None}
    workload = replace(workload, **changes, name=workload.name + ("*" if changes else ""))
    if workload.num_sessions < 1 or workload.concurrency < 1 or workload.n < 1 or workload.prefix_groups < 1:
        raise UsageError("Requests, concurrency, n and prefix groups must be at least 1.")
    return workload


def source_of(arguments: argparse.Namespace, workload: Workload | None = None) -> PromptSource:
    """Words where only words will do, unless told otherwise. Raises UsageError where ids were asked for in vain."""
    reason = None
    if arguments.endpoint == "chat":
        reason = "A chat sends words"
    elif workload is not None and workload.turns != fixed(1):
        reason = "A conversation sends back the server's words"
    text = arguments.prompts or ("ids" if reason is None else "text")
    if reason is not None and text != "text":
        raise UsageError(f"{reason}, so it cannot have --prompts {text}.")
    return prompt_source(text)


def open_transport(arguments: argparse.Namespace) -> Transport:
    if arguments.transport == "httpx":
        return HttpxTransport(arguments.url, api_key=arguments.api_key)
    return RawTransport(arguments.url, api_key=arguments.api_key)


async def open_target(transport: Transport, arguments: argparse.Namespace) -> Target:
    """Asks the server for its model if none was named. Raises UsageError."""
    model = arguments.model
    if model is None:
        try:
            status, body = await transport.get("/v1/models")
            model = json.loads(body)["data"][0]["id"] if status == 200 else None
        except (TransportError, ValueError, LookupError):
            status, model = 0, None
        if model is None:
            raise UsageError(f"No server answers /v1/models at {arguments.url}; name the model with --model.")
    return Target(
        model, arguments.endpoint, not arguments.no_stream, not arguments.no_ignore_eos, arguments.timeout,
        arguments.extra_body, frozenset(arguments.omit),
    )  # fmt: skip


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Sessions and arrival times. Raises UsageError."""
    objective = parse_objective(arguments.slo)
    description: dict[str, Any] = {"url": arguments.url, "seed": arguments.seed, "machine_is": describe_machine()}
    if arguments.trace is not None:
        requests, source = read_trace(arguments.trace), source_of(arguments)
        sessions = trace_sessions(requests, source, arguments.seed, time_scale=arguments.time_scale)
        warmup = trace_sessions(requests[: arguments.warmup], source, arguments.seed + 1)
        description |= {"workload": arguments.trace.name, "loop": f"replay x{arguments.time_scale:g}"}
        return Plan(sessions, None, description, warmup, objective)
    workload = shaped_workload(arguments)
    source = source_of(arguments, workload)
    warmup = replace(workload, num_sessions=arguments.warmup).build(arguments.seed + 1_000_003, source)
    description |= {"workload": workload.name, "shape": workload_row(workload)}
    if arguments.rate is None:
        description["loop"] = f"closed, concurrency {workload.concurrency}"
        return Plan(workload.build(arguments.seed, source), workload.concurrency, description, warmup, objective)
    times = arrival_times(
        arguments.arrivals, arguments.rate, workload.num_sessions, arguments.seed, burstiness=arguments.burstiness
    )
    description |= {"loop": f"open, {arguments.arrivals} {arguments.rate:g}/s", "rate": arguments.rate}
    return Plan(workload.build(arguments.seed, source, times), None, description, warmup, objective)


def workload_row(workload: Workload) -> dict[str, Any]:
    """The shape as JSON data."""
    return {
        "sessions": workload.num_sessions, "concurrency": workload.concurrency,
        "prompt_len": str(workload.prompt_len), "output_len": str(workload.output_len),
        "prefix_len": workload.prefix_len, "prefix_groups": workload.prefix_groups, "turns": str(workload.turns),
        "think_s": workload.think_s, "n": workload.n, "temperature": workload.temperature,
    }  # fmt: skip


async def command(arguments: argparse.Namespace) -> int:
    """Exit code 1 if no request succeeded."""
    plan = make_plan(arguments)
    transport = open_transport(arguments)
    try:
        target = await open_target(transport, arguments)
        result = await measure(
            transport, target, plan, pid=arguments.pid, sample_interval_s=arguments.sample_interval,
            progress=not arguments.no_progress, keep_records=arguments.json is not None,
        )  # fmt: skip
    finally:
        await transport.close()
    result["model"] = target.model
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    print(result_table(result))
    if not result["requests"]["completed"]:
        print("loadtest: no request succeeded", file=sys.stderr)
        return 1
    return 0
