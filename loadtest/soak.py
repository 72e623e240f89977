"""`loadtest soak`: long mixed traffic, with clients that leave, nonsense and bursts. It fails if anything leaks, hangs
or does not add up. Give it --pid, or --command so that it starts the server itself, to watch memory and sockets too.

The KV pool is memory that fills as it is first used: a leak can only be told from that once the pool is full, so soak
a server with a small one (--kv-cache-memory 32MiB).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

from loadtest.cli_compare import duration
from loadtest.cli_run import add_target_arguments, open_target
from loadtest.machine import open_handles, threads
from loadtest.progress import bar, progress_line
from loadtest.scrape import Sampler, scrape
from loadtest.servers import Server, ServerSpec
from loadtest.soak_checks import Tally, check_answers, check_growth, check_idle, check_sums
from loadtest.soak_traffic import Traffic
from loadtest.transport import RawTransport

IDLE_WAIT_S = 30.0
BURST_EVERY_S, BURST_SIZE = 15.0, 24


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("soak", help="long mixed traffic; fails on leaks and lies", allow_abbrev=False)
    add_target_arguments(parser)
    parser.add_argument("--duration", type=duration, default=1200.0, help="20m by default; 60s in CI")
    parser.add_argument("--command", dest="server_command", help="start this server; {port} is a free one")
    parser.add_argument("--pid", type=int, help="the server's process, if it runs already")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--max-growth-mib", type=float, default=24.0, help="memory growth allowed in the second half")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.set_defaults(command=command)


async def command(arguments: argparse.Namespace) -> int:
    """Exit code 1 if a check fails."""
    server = None
    if arguments.server_command:
        server = Server(ServerSpec("soaked", arguments.server_command))
        log = Path(tempfile.mkdtemp(prefix="loadtest-soak-")) / "server.log"
        print(f"starting the server; its log: {log}", file=sys.stderr)
        await server.start({}, log)
        arguments.url, arguments.pid = server.url, server.pid
    try:
        result = await soak(arguments)
    finally:
        if server is not None:
            await server.end()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1))
    counts = result["tally"]
    print(
        f"{counts['completed']} requests completed, {counts['disconnected']} left early, {counts['refused']} bad ones "
        f"refused, {counts['output_tokens']} tokens in {result['duration_s']:.0f} s"
    )
    for fault in result["faults"]:
        print(f"FAULT  {fault}")
    if not result["faults"]:
        print("no faults")
    return int(bool(result["faults"]))


async def soak(arguments: argparse.Namespace) -> dict[str, Any]:
    """Warm-up, traffic, quiet, judgement."""
    watch = RawTransport(arguments.url, api_key=arguments.api_key)
    target = await open_target(watch, arguments)
    tally = Tally()
    transport = RawTransport(arguments.url, api_key=arguments.api_key)
    traffic = Traffic(transport, target, tally, Random(f"soak-{arguments.seed}"))
    for _ in range(3):
        await traffic.good()
    before = await quiet_metrics(watch)
    start = tally.counts()
    sampler = HandleSampler(watch, max(0.2, arguments.duration / 240), arguments.pid)
    await sampler.sample()  # of the idle server: what must be no more at the end
    sampling = asyncio.create_task(sampler.run())
    began = perf_counter()

    def progress() -> str:
        seconds, faults = perf_counter() - began, sum(tally.faults.values())
        return (
            f"soak {bar(seconds, arguments.duration)} {seconds:.0f} of {arguments.duration:.0f} s, {tally.completed} "
            f"completed, {tally.disconnected} left, {tally.refused} refused, {faults} faults"
        )

    async with progress_line(progress):
        tally.unfinished = await run_traffic(traffic, arguments.workers, arguments.duration, target.timeout_s)
    took = perf_counter() - began
    await transport.close()
    sampling.cancel()
    with suppress(asyncio.CancelledError):
        await sampling
    after = await quiet_metrics(watch)
    await sampler.sample()
    await watch.close()
    faults = check_answers(tally)
    if before is not None and after is not None:
        faults += check_idle(after) + check_sums(before, after, tally.since(start))
    faults += check_growth(sampler.samples, memory_limit_bytes=arguments.max_growth_mib * 2**20)
    samples = [{**sample, "t": sample["t"] - began} for sample in sampler.samples]
    row = {**tally.counts(), "statuses": {str(key): count for key, count in tally.statuses.items()}}
    return {"kind": "soak", "duration_s": took, "tally": row, "faults": faults, "series": samples}


class HandleSampler(Sampler):
    """Open files, sockets and threads of the server too (and the tasks of its event loop, if its metrics tell)."""

    async def sample(self) -> None:
        await Sampler.sample(self)
        if self.pid is not None:
            files, sockets = open_handles(self.pid)
            self.samples[-1] |= {"open_files": files, "sockets": sockets, "threads": threads(self.pid)}


async def run_traffic(traffic: Traffic, workers: int, seconds: float, timeout_s: float) -> int:
    """All kinds of clients for so long. Returns how many requests did not finish after that."""
    end = perf_counter() + seconds

    async def repeat(action: Callable[[], Awaitable[None]], pause: Callable[[], float]) -> None:
        while perf_counter() < end:
            await action()
            await asyncio.sleep(min(pause(), max(0.0, end - perf_counter())))

    async def burst() -> None:
        await asyncio.gather(*(traffic.good(short=True) for _ in range(BURST_SIZE)))

    random = Random(traffic.random.random())
    tasks = [asyncio.create_task(repeat(traffic.good, lambda: 0.0)) for _ in range(workers)]
    tasks += [
        asyncio.create_task(repeat(traffic.leaving, lambda: random.expovariate(2.0))),
        asyncio.create_task(repeat(traffic.bad, lambda: random.expovariate(2.0))),
        asyncio.create_task(repeat(burst, lambda: BURST_EVERY_S)),
    ]
    done, pending = await asyncio.wait(tasks, timeout=seconds + min(timeout_s, 120.0))
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()  # a fault of ours must not pass for a good server
    return len(pending)


async def quiet_metrics(watch: RawTransport) -> dict[str, float] | None:
    """The metrics once they show no work, or after 30 s as they are."""
    deadline = perf_counter() + IDLE_WAIT_S
    while True:
        metrics = await scrape(watch)
        if metrics is None or not check_idle(metrics) or perf_counter() > deadline:
            return metrics
        await asyncio.sleep(0.25)
