"""The command line: `python -m loadtest COMMAND`, or `pagemill bench COMMAND`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

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
        code: int = asyncio.run(arguments.command(arguments))
    except UsageError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code
