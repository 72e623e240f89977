"""Server processes: started from a spec, watched until they are ready, paused while another is measured, ended by
their process ids."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from loadtest.client import Target
from loadtest.lengths import UsageError
from loadtest.transport import RawTransport, TransportError

END_GRACE_S = 30.0


@dataclass(frozen=True, slots=True)
class ServerSpec:
    """How a server is started and asked. command: shell words with {port} and the spec's {variables}; empty if it
    runs already, at `url`. port 0: a free one."""

    name: str
    command: str = ""
    url: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    port: int = 0
    ready: str = "/v1/models"
    ready_timeout_s: float = 600.0
    model: str = "model"
    endpoint: str = "completions"
    prompts: str = "ids"
    extra: Mapping[str, Any] = field(default_factory=dict)
    omit: tuple[str, ...] = ()
    expand_n: bool = False  # it knows no n: a request with n = 4 becomes four requests

    def target(self, variables: Mapping[str, str]) -> Target:
        return Target(self.model.format(**variables), self.endpoint, extra=self.extra, omit=frozenset(self.omit))

    def words(self, port: int, variables: Mapping[str, str]) -> list[str]:
        """Raises UsageError on a variable that nobody set."""
        try:
            self.target(variables)
            return [word.format(port=port, **variables) for word in shlex.split(self.command)]
        except KeyError as error:
            name = error.args[0]
            raise UsageError(f"Server {self.name}: nobody set {name!r}; add --set {name}=...") from None


def server_spec(row: Mapping[str, Any]) -> ServerSpec:
    """From a [[server]] table. Raises UsageError."""
    names = set(ServerSpec.__dataclass_fields__)
    if unknown := set(row) - names:
        raise UsageError(f"A [[server]] has no field {sorted(unknown)[0]!r}; it has {', '.join(sorted(names))}.")
    if "name" not in row or ("command" in row) == ("url" in row):
        raise UsageError("Every [[server]] needs a name and either a command or a url.")
    return ServerSpec(**{**row, "omit": tuple(row.get("omit", ()))})


class Server:
    """One running server. Its process leads a group of its own, so that its children stop and end with it."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec = spec
        self.url = spec.url
        self.start_s: float | None = None  # seconds from start to ready
        self._process: asyncio.subprocess.Process | None = None
        self._paused = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self, variables: Mapping[str, str], log: Path) -> None:
        """Until it answers. Raises UsageError with the end of its log if it does not."""
        begun = perf_counter()
        if self.spec.command:
            port = self.spec.port or free_port()
            self.url = f"http://127.0.0.1:{port}"
            words = self.spec.words(port, variables)
            env = os.environ | {key: value.format(port=port, **variables) for key, value in self.spec.env.items()}
            with log.open("ab") as file:  # a second start keeps what the first one said
                try:
                    self._process = await asyncio.create_subprocess_exec(
                        *words, stdout=file, stderr=file, env=env, cwd=self.spec.cwd or None, start_new_session=True
                    )
                except OSError as error:
                    raise UsageError(f"Server {self.spec.name}: cannot start {words[0]}: {error.strerror}.") from None
        if not await self._is_ready(begun + self.spec.ready_timeout_s):
            await self.end()
            raise UsageError(f"Server {self.spec.name} did not get ready; its log {log} ends:\n{_tail(log)}")
        self.start_s = perf_counter() - begun

    async def _is_ready(self, deadline: float) -> bool:
        while perf_counter() < deadline:
            if self._process is not None and self._process.returncode is not None:
                return False
            transport = RawTransport(self.url)
            with suppress(TransportError, TimeoutError):
                async with asyncio.timeout(5):
                    status, _ = await transport.get(self.spec.ready)
                    if status == 200:
                        await transport.close()
                        return True
            await transport.close()
            await asyncio.sleep(0.1)
        return False

    async def answers(self, within_s: float = 10.0) -> bool:
        """Whether it says that it is ready, soon."""
        return await self._is_ready(perf_counter() + within_s)

    def pause(self) -> None:
        """Takes it off the CPU, so that what it does while idle does not disturb another's measurement."""
        self._paused = self._signal(signal.SIGSTOP) or self._paused

    def resume(self) -> None:
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False

    async def end(self) -> None:
        """SIGTERM, after 30 s SIGKILL, to the process and what it started. Idempotent."""
        process = self._process
        if process is None:
            return
        self.resume()
        if process.returncode is None:
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(END_GRACE_S):
                    await process.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await process.wait()
        self._signal(signal.SIGKILL)  # children that outlived it
        self._process = None

    def _signal(self, number: signal.Signals) -> bool:
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def _tail(log: Path) -> str:
    return log.read_bytes()[-2000:].decode(errors="replace") if log.exists() else ""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
