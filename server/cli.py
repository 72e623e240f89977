"""`pagemill serve | check | chat | bench`: flags in, exit code out.

A command's module is imported inside its command: `--help` and `chat` must not wait for torch, and `serve` sets the
thread variables before torch reads them.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from engine.config import StartError
from server.settings import (
    Settings,
    SettingsError,
    choices_of,
    env_of,
    flag_of,
    is_list,
    key_in_environment,
    load,
    meta,
    set_thread_environment,
    unknown_in_environment,
)

USAGE_ERROR = 2
COMMANDS = {
    "serve": "serve a model over HTTP",
    "check": "print what serving a model would need, without serving it",
    "chat": "talk to a running server",
    "bench": "measure a running server (python -m loadtest)",
}


class Parser(argparse.ArgumentParser):
    """Errors are one sentence; the usage of 40 flags would bury it."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"pagemill: {message}\nTry '{self.prog} --help'.\n")


def main(argv: Sequence[str] | None = None) -> int:
    """argv: without the program's name; None takes the process's.

    Returns the exit code: 0, 1 when something failed, 2 for a wrong command line."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["bench"]:
        return _bench(argv[1:])
    arguments = build_parser().parse_args(argv)
    given = vars(arguments)
    if given["command"] in ("serve", "check"):
        # Until the server has handlers of its own, Ctrl-C ends the process: raised inside the import of a library, a
        # KeyboardInterrupt may be swallowed there or come out as a broken module.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        match given.pop("command"):
            case "serve":
                return _serve(_settings(given))
            case "check":
                return _check(_settings(given), given["lengths"])
            case _:
                return _chat(given)
    except SettingsError as error:
        print(f"pagemill: {error}", file=sys.stderr)
        return USAGE_ERROR
    except StartError as error:
        print(f"pagemill: {_printable(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


# -- commands -----------------------------------------------------------------------------------------------------


def _serve(settings: Settings) -> int:
    """Parse (done), bind, look at the model, set thread variables, only then import torch."""
    if settings.api_key_file is not None or settings.tls_cert is not None:
        signal.signal(
            signal.SIGHUP, signal.SIG_IGN
        )  # the files are still to be read; later it means to read them again
    with _uncollected():
        from server import logs, preflight

        logs.configure(settings.log_level, settings.log_format)
        for name in unknown_in_environment():
            logging.getLogger("pagemill.server").warning("%s is no setting; docs/settings.md lists all", name)
        config = settings.engine_config()
        from server import lifecycle

        listener = lifecycle.bind(settings)
        preflight.check_model(settings.model, settings.load_format)
        preflight.check_adapters(settings.lora_modules)
        set_thread_environment(settings)
        from engine.async_engine import AsyncEngine
    gc.freeze()
    try:
        from uvloop import new_event_loop as loop_factory
    except ImportError:  # there is no uvloop for Windows
        loop_factory = None
    died = False
    try:
        code = lifecycle.serve(settings, lambda: AsyncEngine(config), listener, loop_factory)
        died = code != 0
    except StartError as error:
        print(f"pagemill: {_printable(error)}", file=sys.stderr)
        code = 1
    except Exception:
        logging.getLogger("pagemill.server").critical("the server failed", exc_info=True)
        code = 1
    lifecycle.leave(code, died=died)
    return code


def _printable(error: StartError) -> str:
    """A sentence may quote names from the files of a stranger: they shall not command the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(error))


@contextmanager
def _uncollected() -> Iterator[None]:
    """For imports: the libraries make 400,000 objects that never die, and looking through them again and again is a
    fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _check(settings: Settings, lengths: Sequence[int]) -> int:
    from server import preflight

    config = settings.engine_config()
    preflight.check_model(settings.model, settings.load_format)
    preflight.check_adapters(settings.lora_modules)
    set_thread_environment(settings)
    from server import check

    print(check.report(config, lengths, settings.served_model_name))
    return 0


def _chat(given: dict[str, Any]) -> int:
    from server import chat_client

    given["api_key"] = given["api_key"] or key_in_environment()
    return chat_client.run(chat_client.Options(**given))


def _bench(argv: Sequence[str]) -> int:
    """The measuring client parses its own flags: it knows nothing of this package."""
    from loadtest import cli

    return cli.main(argv)


# -- flags --------------------------------------------------------------------------------------------------------


def build_parser() -> Parser:
    parser = Parser(prog="pagemill", description="An OpenAI-compatible server for large language models.")
    parser.add_argument("--version", action="version", version=f"pagemill {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    serve, check, chat, _ = (
        commands.add_parser(name, help=text, description=text, allow_abbrev=False, argument_default=argparse.SUPPRESS)
        for name, text in COMMANDS.items()
    )
    serve.usage, check.usage = "pagemill serve [MODEL] [FLAGS]", "pagemill check [MODEL] [FLAGS]"
    add_settings(serve)
    add_settings(check)
    check.add_argument(
        "--lengths",
        type=_lengths,
        default=(512, 2048, 8192),
        metavar="N,N",
        help="sequence lengths (tokens) to tell the concurrency for (default: 512,2048,8192)",
    )
    chat.add_argument("--base-url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    chat.add_argument("--api-key", default=None, help="the server's key [PAGEMILL_API_KEY]")
    chat.add_argument("--model", default=None, help="name of the model (default: the server's first)")
    chat.add_argument("--system", default=None, help="system message")
    chat.add_argument("--temperature", type=float, default=None, help="(default: the model's)")
    chat.add_argument("--max-tokens", type=int, default=None, help="per answer (default: what fits)")
    return parser


def add_settings(parser: argparse.ArgumentParser) -> None:
    """MODEL, --config and one flag per field of Settings. Values stay text: Settings validates them."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=Settings.model_fields["model"].description)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    groups: dict[str, Any] = {}
    for name, info in Settings.model_fields.items():
        if name == "model":
            continue
        facts = meta(info)
        group = groups.get(facts["group"]) or parser.add_argument_group(facts["group"])
        groups[facts["group"]] = group
        default = "" if info.default in (None, ()) else f"; default {info.default}"
        unit = f" {facts['unit']}" if facts["unit"] and default else ""
        text = f"{info.description} [{env_of(name)}{default}{unit}]".replace("%", "%%")
        options: dict[str, Any] = {"dest": name, "help": text}
        if isinstance(info.default, bool):
            options["action"] = argparse.BooleanOptionalAction
        elif is_list(info):
            several = {"action": "extend", "nargs": "+", "metavar": facts["metavar"]}
            options |= several if facts["metavar"] else {"action": "append", "metavar": "TEXT"}
        else:
            options["metavar"] = (
                "{" + ",".join(choices_of(info)) + "}" if choices_of(info) else (facts["unit"].upper() or "VALUE")
            )
        group.add_argument(flag_of(name), **options)


def _settings(given: dict[str, Any]) -> Settings:
    config = given.get("config")
    return load({name: value for name, value in given.items() if name in Settings.model_fields}, config)


def _lengths(text: str) -> tuple[int, ...]:
    values = tuple(int(part) for part in text.split(","))
    if min(values) < 1:
        raise ValueError("lengths are positive")
    return values


def _version() -> str:
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0 (not installed)"
