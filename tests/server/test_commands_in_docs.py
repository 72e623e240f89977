"""What the README and docs/ tell to type is taken as it stands there: by the program's own parser, which is as far as
it goes here. So are the commands of the scripts that nobody types, and those of the benches' own descriptions."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server import cli
from server.settings import Settings, load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
DESCRIBED = [
    *sorted((ROOT / "tests/bench").glob("*.py")),
    ROOT / "tests/perplexity.py",
    ROOT / "tests/emulation/build.py",
]
SCRIPTS = (".ci/run", ".ci/full", ".github/workflows/release.yml", "config/cpu.toml", "config/h200.toml")
PROGRAM = re.compile(r"(?:\.venv/bin/)?(?:pagemill|python3? -m (?:server|loadtest|tests)[\w.]*)(?= |$)")
FENCED = re.compile(r"^```.*?\n(.*?)^```$|((?:^ {4}[^\n]*\n)+)", re.MULTILINE | re.DOTALL)
NAMED_ONLY = (["bench"], ["bench", "COMMAND"], ["bench", "ratio"])  # named in a sentence, not told to be typed
PLACEHOLDERS = {"PID": "1", "N": "1", "...": "name=value", "NUMBER": "1"}


def commands(text: str) -> Iterator[str]:
    """Lines of blocks, and pieces of the text in backticks, from the name of a program of ours on."""
    blocks = "".join((match[1] or match[2] or "") for match in FENCED.finditer(text)).replace("\\\n", " ")
    pieces = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    for line in (*blocks.splitlines(), *(piece.replace("\n", " ") for piece in pieces)):
        line = re.sub(r"\$\([^)]*\)", "1", line.strip().removeprefix("$ "))
        if PROGRAM.match(line):
            yield re.split(r" \| | &$", line)[0]


def steps(text: str) -> Iterator[str]:
    """Of a script: from the name of a program on, to the line's end; in comments, what is in backticks."""
    for line in text.replace("\\\n", " ").splitlines():
        code, _, comment = line.partition("#")
        yield from commands(comment)
        if match := PROGRAM.search(code):
            yield re.split(r" \| | &$", code[match.start() :])[0]


def usages(path: Path) -> Iterator[str]:
    """Indented lines of a module's description; what is in brackets may be left out, and is not."""
    for line in re.findall(r"^ {4}(python -m .*)$", path.read_text("utf-8").split('"""')[1], re.MULTILINE):
        yield re.sub(r"[][]", "", re.split(r" {3,}", line)[0])


TOLD = sorted({c for page in PAGES for c in commands(page.read_text("utf-8"))})
STEPS = sorted({c for script in SCRIPTS for c in steps((ROOT / script).read_text("utf-8"))} - set(TOLD))
USAGES = sorted({usage for path in DESCRIBED for usage in usages(path)})


class Parsed(Exception):
    """Raised in place of what a program does with its arguments."""


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[argparse.Namespace]:
    """The arguments of each program that was run; it ends there."""
    seen: list[argparse.Namespace] = []
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> argparse.Namespace:
        seen.append(parse(self, *arguments))
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    monkeypatch.chdir(ROOT)
    return seen


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(command, comments=True)]
    name = words.pop(0)
    if name.endswith("pagemill"):
        if words and words not in NAMED_ONLY:
            cli.main(words)
        return
    module = words.pop(1)
    spec = importlib.util.find_spec(module)
    assert spec is not None, command
    if spec.submodule_search_locations is not None:
        assert importlib.util.find_spec(module + ".__main__") is not None
        module += ".cli"
    main = importlib.import_module(module)
    if hasattr(main, "argparse") and words[1:] != ["COMMAND"]:
        monkeypatch.setattr(sys, "argv", [module, *words[1:]])
        main.main()


@pytest.mark.parametrize("command", [*TOLD, *STEPS, *USAGES])
def test_it_parses(command: str, parsed: list[argparse.Namespace], monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        run(command, monkeypatch)
    except Parsed:
        given = vars(parsed[0])
        if given.get("command") in ("serve", "check"):
            load({name: value for name, value in given.items() if name in Settings.model_fields}, given.get("config"))
    except SystemExit:
        pytest.fail(f"{command} is no command line of its program")


def test_what_is_told_is_found() -> None:
    assert len(TOLD) > 40
    assert len(STEPS) > 3
    assert len(USAGES) >= len(list((ROOT / "tests/bench").glob("bench_*.py")))
    assert {"pagemill check MODEL", "python3 -m server.keys alice"} <= set(TOLD)


def test_targets_and_scripts_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for page in PAGES:
        text = page.read_text("utf-8")
        for target, arguments in re.findall(r"(?:`|^ {4})make (\w+)(?: ARGS='([^']*)')?", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: make {target}"
            if target == "serve" and arguments:
                cli.build_parser().parse_args(["serve", *shlex.split(arguments)])
        for script in re.findall(r"(?:tests|loadtest|deploy)/[\w/]+\.(?:sh|py)(?= )", text):
            assert (ROOT / script).is_file(), f"{page.name}: {script}"
