"""Carries out a Dockerfile without Docker: every instruction of a target's stages, in order, each RUN in a root of its
own. What the last stage leaves is an `Image`, and `Container` runs it as Docker would: as its user, with its
environment, its volume, and process number 1.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.deploy.clean_root import PATH, Network, Root
from tests.deploy.dockerfile import (
    Context,
    Dockerfile,
    DockerfileError,
    Instruction,
    Stage,
    assignments,
    flags,
    substitute,
)


@dataclass
class Image:
    """A root, and what Docker would remember beside it."""

    root: Root
    env: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    user: str = "0:0"
    workdir: str = "/"
    volumes: list[str] = field(default_factory=list)
    ports: list[str] = field(default_factory=list)
    stop_signal: str = "SIGTERM"
    health_command: list[str] | None = None
    health_times: dict[str, str] = field(default_factory=dict)
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    toolkit: dict[Path, str] = field(default_factory=dict)  # of a base: what its RUN steps see of outside, and where


class Replay:
    """bases: image name -> the root that plays it; arguments: as `docker build --build-arg`."""

    def __init__(
        self,
        dockerfile: Dockerfile,
        context: Context,
        bases: Mapping[str, Callable[[], Image]],
        folder: Path,
        network: Network,
        arguments: Mapping[str, str],
    ) -> None:
        self._dockerfile = dockerfile
        self._context = context
        self._bases = bases
        self._folder = folder
        self._network = network
        self._arguments = arguments
        self._built: dict[str, Image] = {}
        self.log: list[str] = []  # what was carried out: "stage: WORD rest"

    def build(self, target: str) -> Image:
        """The target's image; other stages are built when they are copied from. Raises AssertionError if a step
        fails."""
        if target not in self._built:
            stage = self._dockerfile.stage(target)
            name = substitute(stage.base, {**self._dockerfile.defaults, **self._arguments})
            base = self._bases[name]()
            image = Image(base.root.copy(self._folder / target), dict(base.env), toolkit=base.toolkit)
            declared: dict[str, str] = {}
            for instruction in stage.instructions:
                self._step(stage, image, declared, instruction)
                self.log.append(f"{stage.name}: {instruction.word} {instruction.rest}")
            self._built[target] = image
        return self._built[target]

    def _step(self, stage: Stage, image: Image, declared: dict[str, str], instruction: Instruction) -> None:
        values = {**declared, **image.env}
        rest = instruction.rest
        match instruction.word:
            case "ARG":
                name, _, default = rest.partition("=")
                declared[name] = self._arguments.get(name, substitute(default, values))
            case "ENV":
                image.env |= assignments(rest, values)
            case "WORKDIR":
                image.workdir = substitute(rest, values)
                (image.root.path / image.workdir.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "RUN":
                self._run(image, {**declared, **image.env}, rest)
            case "COPY":
                self._copy(image, substitute(rest, values))
            case "USER":
                image.user = rest
            case "VOLUME":
                image.volumes.append(rest)
            case "EXPOSE":
                image.ports.append(rest)
            case "STOPSIGNAL":
                image.stop_signal = rest
            case "HEALTHCHECK":
                image.health_times, command = flags(rest)
                image.health_command = Instruction(instruction.line, "CMD", command.removeprefix("CMD ")).json_list()
            case "ENTRYPOINT":
                image.entrypoint = instruction.json_list() or []
            case "CMD":
                image.command = instruction.json_list() or []
            case word:
                raise DockerfileError(f"{stage.name}: {word} is not carried out")

    def _run(self, image: Image, env: Mapping[str, str], script: str) -> None:
        image.root.run(
            ["/bin/sh", "-c", script],
            env={**self._network.env, **env},
            user=image.user,
            workdir=image.workdir,
            read_only_mounts={**self._network.mounts, **image.toolkit},
            tmpfs=["/tmp"],
        )

    def _copy(self, image: Image, rest: str) -> None:
        """Files keep their modes and belong to root. A folder's content goes into the target, as Docker has it."""
        given, text = flags(rest)
        *sources, target = text.split()
        into = image.root.path / (target if target.startswith("/") else f"{image.workdir}/{target}").lstrip("/")
        if "from" in given:
            (source,) = sources
            origin = self.build(given["from"]).root.path / source.lstrip("/")
            shutil.copytree(origin, into, symlinks=True, dirs_exist_ok=True)
            return
        for source in sources:
            for name in self._context.files(source):
                path = self._context.root / source
                inner = Path(name).relative_to(source) if path.is_dir() else Path(Path(name).name)
                place = into / inner if path.is_dir() or target.endswith("/") else into
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(self._context.root / name, place)
                os.chown(place, 0, 0)


class Container:
    """`docker run --read-only` of an image, with a new volume; stdout and stderr go to `log`."""

    def __init__(
        self, image: Image, log: Path, volume: Path, env: Mapping[str, str], words: Sequence[str] | None = None
    ) -> None:
        self.image = image
        self._log = log
        self.volume = volume
        self.env = {**image.env, **env}
        (inside,) = image.volumes
        subprocess.run(
            ["cp", "-a", f"{image.root.path}{inside}", str(volume)], check=True
        )  # as Docker fills a new one
        command = image.root.command(
            [*image.entrypoint, *(image.command if words is None else words)],
            env=self.env,
            user=image.user,
            workdir=image.workdir,
            mounts={volume: inside},
            read_only=True,
        )
        with log.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def first_process(self) -> int:
        """Process 1 of the container, as this side numbers it."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        for _ in range(100):
            if found := children.read_text().split():
                return int(found[0])
            time.sleep(0.05)
        raise AssertionError(f"the container did not start:\n{self.log}")

    def stop(self) -> None:
        """`docker stop`, without the wait."""
        os.kill(self.first_process, signal.Signals[self.image.stop_signal])

    def inside(self, words: Sequence[str], user: str | None = None) -> subprocess.CompletedProcess[str]:
        """`docker exec`."""
        uid, gid = (user or self.image.user).split(":")
        enter = ["nsenter", f"--target={self.first_process}", "--mount", "--pid", "--root", "--wd"]
        variables = [f"{name}={value}" for name, value in self.env.items()]
        command = [*enter, f"--setuid={uid}", f"--setgid={gid}", "env", "-i", *variables, *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)

    def wait_healthy(self, timeout_s: float) -> None:
        """Until the image's own health check passes. Raises AssertionError when the process ends or time runs out."""
        assert self.image.health_command
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            assert self.process.poll() is None, f"the container ended with {self.process.returncode}:\n{self.log}"
            if self.inside(self.image.health_command).returncode == 0:
                return
            time.sleep(0.5)
        raise AssertionError(f"not healthy within {timeout_s} s:\n{self.log}")

    def end(self) -> None:
        if self.process.poll() is None:
            os.kill(self.first_process, signal.SIGKILL)
        self.process.wait()
