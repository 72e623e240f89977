"""The command line: `python -m loadtest COMMAND`, or `pagemill bench COMMAND`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from loadtest import cli_compare, cli_run, kv_waste, ratio, report, soak, sweep
from loadtest.lengths import UsageError

COMMANDS = (cli_run, cli_compare, sweep, report, soak, kv_waste, ratio)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, 1 if the measurement failed (see the command), 2 on bad usage."""
    parser = argparse.ArgumentParser(
        prog="loadtest", description="Measure OpenAI-compatible servers.", allow_abbrev=False
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            code = runner.run(_run(arguments))
    except UsageError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed: it takes a third off the client's work per token."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _run(arguments: argparse.Namespace) -> int:
    """The command, cancelled by SIGTERM: the servers that it started, some of them stopped, must not outlive it."""
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(arguments.command(arguments))
    with suppress(NotImplementedError):
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        code: int = await task
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    return code
