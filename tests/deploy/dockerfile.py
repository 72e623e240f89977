"""Reads a Dockerfile into stages of instructions: the part of the language that ours uses, and no more. An instruction
or form that is not known here is an error, so that nothing goes unreplayed."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

KNOWN = {
    "FROM", "ARG", "RUN", "COPY", "ENV", "WORKDIR", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK",
    "ENTRYPOINT", "CMD",
}  # fmt: skip
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


class DockerfileError(Exception):
    """The file says something that the replay does not know."""


@dataclass(frozen=True)
class Instruction:
    line: int
    word: str
    rest: str

    def json_list(self) -> list[str] | None:
        """The exec form (["a", "b"]), else None."""
        if not self.rest.startswith("["):
            return None
        words = json.loads(self.rest)
        if not (isinstance(words, list) and all(isinstance(word, str) for word in words)):
            raise DockerfileError(f"line {self.line}: {self.rest} is no list of texts")
        return words


@dataclass
class Stage:
    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass(frozen=True)
class Dockerfile:
    defaults: Mapping[str, str]  # the ARGs before the first FROM
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        return next(stage for stage in self.stages if stage.name == name)


def parse(path: Path) -> Dockerfile:
    """Raises DockerfileError."""
    defaults: dict[str, str] = {}
    stages: list[Stage] = []
    for instruction in _instructions(path.read_text("utf-8")):
        if instruction.word == "FROM":
            match = re.fullmatch(r"(\S+) AS (\S+)", instruction.rest)
            if match is None:
                raise DockerfileError(f"line {instruction.line}: a stage without a name")
            stages.append(Stage(match[2], match[1]))
        elif stages:
            stages[-1].instructions.append(instruction)
        elif instruction.word == "ARG":
            name, _, value = instruction.rest.partition("=")
            defaults[name] = value
        else:
            raise DockerfileError(f"line {instruction.line}: {instruction.word} before the first FROM")
    return Dockerfile(defaults, tuple(stages))


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    start, held = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        start = start if held else number
        held += line.strip() if held else line
        if held.endswith("\\"):
            held = held[:-1]
            continue
        word, _, rest = held.partition(" ")
        if word not in KNOWN:
            raise DockerfileError(f"line {start}: {word} is not an instruction that the replay knows")
        found.append(Instruction(start, word, rest.strip()))
        held = ""
    if held:
        raise DockerfileError(f"line {start}: the file ends in a continuation")
    return found


def substitute(text: str, values: Mapping[str, str]) -> str:
    """$NAME and ${NAME}; an unknown name is empty, as in Docker."""
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)


def assignments(text: str, values: Mapping[str, str]) -> dict[str, str]:
    """`A=1 B="x y"` of an ENV line."""
    return {name: value for name, _, value in (word.partition("=") for word in shlex.split(substitute(text, values)))}


def flags(text: str) -> tuple[dict[str, str], str]:
    """The leading `--name=value` words, and what follows them."""
    given: dict[str, str] = {}
    while text.startswith("--"):
        word, _, text = text.partition(" ")
        name, _, value = word[2:].partition("=")
        given[name] = value
    return given, text.lstrip()


class Context:
    """The build context: the files below `root` that .dockerignore lets through."""

    def __init__(self, root: Path) -> None:
        self.root = root
        lines = (root / ".dockerignore").read_text("utf-8").splitlines()
        self._patterns = [line.strip() for line in lines if line.strip() and not line.startswith("#")]

    def has(self, path: str) -> bool:
        """Whether `path` (relative, with /) is sent to the builder: the last pattern that fits it, or a folder above
        it, decides."""
        kept = True
        for pattern in self._patterns:
            if _fits(path, pattern.removeprefix("!")):
                kept = pattern.startswith("!")
        return kept

    def files(self, source: str) -> list[str]:
        """Files of the context at or below `source`, relative to the root. Raises DockerfileError if none is."""
        start = self.root / source
        candidates = [start] if start.is_file() else sorted(path for path in start.rglob("*") if path.is_file())
        names = [path.relative_to(self.root).as_posix() for path in candidates]
        kept = [name for name in names if self.has(name)]
        if not kept:
            raise DockerfileError(f"COPY {source}: the build context has nothing there")
        return kept


def _fits(path: str, pattern: str) -> bool:
    parts = path.split("/")
    heads = ["/".join(parts[: count + 1]) for count in range(len(parts))]
    if pattern.startswith("**/"):
        return any(fnmatch.fnmatchcase(part, pattern[3:]) for part in parts)
    return any(head.count("/") == pattern.count("/") and fnmatch.fnmatchcase(head, pattern) for head in heads)
