"""The life of a serving process: listen, load, serve, drain, end. The one place that knows signals and exit codes.

First SIGTERM or SIGINT: new work gets 503 and `Connection: close`, what is in flight finishes within the grace
period, the rest ends with an error event, then the listener closes; exit code 0. A second signal ends the process at
once. SIGHUP reads key file and certificate again, where there are any. The engine's death answers what is in flight
and ends with exit code 1, so that a supervisor restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from engine.config import StartError
from engine.outputs import ModelInfo, Phase
from server.app import create_app
from server.auth import is_local
from server.connections import Connection, ConnectionLimits, ServerConfig, check_stalls
from server.engine_port import Engine
from server.front import front_for
from server.gate import Gate, GateLimits
from server.metrics import Metrics
from server.progress import shown
from server.reload import Reloader, certificate_of
from server.settings import Settings

logger = logging.getLogger("pagemill.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048  # connections the kernel queues before they are accepted; it has a limit of its own (somaxconn)
TICK_S = 0.25  # how often lag is measured
STALL_TICKS = 4  # connections are looked at on every fourth of them
ECHO_S = 0.2  # the same signal, sent to the process and to its group or passed on by make, is one signal
MAX_HEAD = 64 << 10  # bytes of a request's line and headers
MAX_UNREAD = 1 << 20  # bytes of a stream that its client has not taken
SPARE_FILES = 512  # open ones for all but connections
LAST_ANSWER_S = 3600.0  # under TLS, of a connection that closes; `check_stall` cuts off who does not read it
HANDSHAKE_S = 10.0  # under TLS, for a client's first record, and again for the rest of the handshake
FLUSH_S = 3.0  # answers that the engine has ended have this long to reach their clients


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: closing the listener comes last here, and there it comes first. And with a
    gate of ours before its connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        config = self.config
        assert isinstance(config, ServerConfig)
        limits = GateLimits(
            max_callers=config.limits.max_connections,
            handshake_s=min(HANDSHAKE_S, config.limits.head_timeout_s),
            goodbye_s=LAST_ANSWER_S,
        )
        self.servers = []
        for listener in sockets or ():
            gate = Gate(
                listener,
                lambda: Connection(config, self.server_state, {}),
                limits,
                certificate=lambda: config.ssl,
                on_pushed_out=config.metrics.connection_closed_for_room,
            )
            gate.open(config.backlog)
            self.servers.append(gate)  # type: ignore[arg-type]  # all that uvicorn does with it is to close it
        self.started = True


class Lifecycle:
    """run() serves until a signal or the engine's death and returns the exit code."""

    def __init__(self, settings: Settings, engine: Engine, listener: socket.socket) -> None:
        self._settings = settings
        self._engine = engine
        self._listener = listener
        self._signalled_s: float | None = None
        self._ending = asyncio.Event()
        self._exit_code = 0

    async def run(self) -> int:
        """Raises StartError if the model cannot be loaded."""
        app = create_app(self._settings, self._engine, end=self._ending.set)
        metrics: Metrics = app.state.metrics
        config = self._server_config(app, metrics)
        server = Server(config)
        self._catch_signals(app.state.reloader)
        imported_s = time.monotonic()
        config.load()
        if self._settings.tls_cert is not None:
            config.ssl = certificate_of(self._settings)
            app.state.reloader.serve_with(config)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        loading = asyncio.create_task(self._engine.start())
        watching = asyncio.create_task(self._watch(server, metrics))
        ending = asyncio.create_task(self._ending.wait())
        try:
            with shown(self._engine.progress, self._settings):
                await asyncio.wait({loading, ending, serving}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                front_for(app)
                gc.freeze()  # 400,000 objects of the imports never die; a walk over them stops all threads for 0.5 s
                self._announce(metrics, imported_s)
                await self._serve_until_end(serving)
            await self._end(server)
        finally:
            for task in (watching, ending, loading):
                task.cancel()
            server.should_exit = True
            await serving
            if (tracing := app.state.tracing) is not None:
                tracing.close()  # holds up nobody: the last answer is out
        return self._exit_code

    async def _serve_until_end(self, serving: asyncio.Task[None]) -> None:
        death = asyncio.create_task(self._engine.wait_dead())
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({death, ending, serving}, return_when=asyncio.FIRST_COMPLETED)
        if death.done() and not ending.done():
            logger.critical("the engine has died; the server ends")
            self._exit_code = 1
        for task in (death, ending):
            task.cancel()

    async def _end(self, server: Server) -> None:
        """Drain, let the last answers out, stop the engine."""
        loaded = self._engine.phase is not Phase.STARTING
        if self._engine.phase in (Phase.READY, Phase.STARTING):
            logger.info("draining", extra={"fields": {"grace_s": self._settings.grace_period}})
            await self._engine.drain(self._settings.grace_period if loaded else 0.0)
        if answering := set(server.server_state.tasks):
            await asyncio.wait(answering, timeout=FLUSH_S)
        server.should_exit = True
        if loaded:  # a model that is still loading is not waited for
            await self._engine.stop()

    async def _watch(self, server: Server, metrics: Metrics) -> None:
        """Measure how late the loop runs; look for a step that hangs and for clients that do not read."""
        hung = False
        for tick in itertools.count():
            before = time.monotonic()
            await asyncio.sleep(TICK_S)
            metrics.loop_lag(max(0.0, time.monotonic() - before - TICK_S))
            if tick % STALL_TICKS == 0:
                check_stalls(server.server_state)
                was_hung, hung = hung, self._engine.phase is not Phase.STARTING and self._engine.hung
                if hung and not was_hung:
                    logger.error("a step takes longer than --step-timeout; /health says hung")

    def _catch_signals(self, reloader: Reloader) -> None:
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        if reloader.has_files:  # else a terminal that closes ends the server, as it ends any program
            loop.add_signal_handler(signal.SIGHUP, _reload, reloader)

    def _on_signal(self, number: signal.Signals) -> None:
        if self._signalled_s is not None:
            if time.monotonic() - self._signalled_s < ECHO_S:
                return
            logger.warning("second signal: ending at once")
            logging.shutdown()
            os._exit(1)
        logger.info("signal", extra={"fields": {"name": number.name}})
        self._signalled_s = time.monotonic()
        self._ending.set()

    def _server_config(self, app: FastAPI, metrics: Metrics) -> ServerConfig:
        settings = self._settings
        limits = ConnectionLimits(
            max_connections=connections_for(settings),
            max_head=MAX_HEAD,
            head_timeout_s=settings.client_timeout,
            max_unread=MAX_UNREAD,
            max_stall_s=settings.client_timeout,
        )
        return ServerConfig(
            app,
            limits,
            metrics,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=max(1, round(settings.keep_alive)),
            timeout_graceful_shutdown=round(FLUSH_S),
        )

    def _announce(self, metrics: Metrics, imported_s: float) -> None:
        info = self._engine.model_info
        metrics.model_loaded(info)
        settings = self._settings
        for message, fields in (
            ("model", _model_facts(info)),
            ("sampling defaults", _sampling_facts(info)),
            ("KV pool", _pool_facts(info)),
            ("start-up seconds", self._times(info, imported_s)),
        ):
            logger.info(message, extra={"fields": fields})
        host, port = self._listener.getsockname()[:2]
        names = ", ".join([*(settings.served_model_name or (info.name,)), *metrics.adapters.adapters])
        shown = f"[{host}]" if ":" in host else host
        if not (settings.api_key or settings.api_key_file or is_local(settings.host)):
            logger.warning("without an API key, everybody who reaches this port is served")
        scheme = "http" if settings.tls_cert is None else "https"
        logger.info(f"ready: serving {names} on {scheme}://{shown}:{port}")

    def _times(self, info: ModelInfo, imported_s: float) -> dict[str, object]:
        started_s = process_started_s()
        parts = {"imports": imported_s - started_s, **info.load_seconds, "total": time.monotonic() - started_s}
        return {name: round(seconds, 2) for name, seconds in parts.items()}


def _reload(reloader: Reloader) -> None:
    with contextlib.suppress(StartError):  # the log has it
        reloader.reload()


def _model_facts(info: ModelInfo) -> dict[str, object]:
    return {
        "name": info.name,
        "source": info.source,
        "architecture": info.architecture,
        "parameters": f"{info.num_parameters / 1e6:.1f}M",
        "device": info.numeric_profile.get("device", "cpu"),
        "attention_backend": info.numeric_profile.get("attention_backend", "native"),
        "dtype": info.dtype,
        "quantization": info.quantization,
        "max_model_len": info.max_model_len,
        "threads": info.num_threads,
        "batch_invariant": info.batch_invariant,
        "system_fingerprint": info.system_fingerprint,
    }


def _sampling_facts(info: ModelInfo) -> dict[str, object]:
    defaults = info.sampling_defaults
    given = {name: getattr(defaults, name) for name in type(defaults).__dataclass_fields__}
    return {name: value for name, value in given.items() if value is not None} or {"from": "neutral"}


def _pool_facts(info: ModelInfo) -> dict[str, object]:
    tokens = info.num_blocks * info.block_size
    return {
        "blocks": info.num_blocks,
        "block_size": info.block_size,
        "tokens": tokens,
        "bytes_per_token": info.kv_bytes_per_token,
        "MiB": round(tokens * info.kv_bytes_per_token / 2**20, 1),
    }


def bind(settings: Settings) -> socket.socket:
    """A listening socket. Raises StartError with one sentence: the port is taken, the address is not ours."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
        listener.listen(BACKLOG)  # now, so that two servers cannot both believe they have the port
    except (OSError, TypeError, UnicodeError) as error:  # the latter two: no host name can look like that
        listener.close()
        reason = getattr(error, "strerror", None) or "the host name is not valid"
        raise StartError(f"Cannot listen on {settings.host}:{settings.port}: {reason.lower()}.") from None
    listener.setblocking(False)
    return listener


def check_tls(settings: Settings) -> None:
    """Raises StartError for a certificate or key that cannot be used."""
    if settings.tls_cert is None:
        if settings.tls_key is not None:
            raise StartError("--tls-key needs --tls-cert.")
        return
    certificate_of(settings)


def connections_for(settings: Settings) -> int:
    """How many client connections there may be: --max-connections, or fewer where the system does not let us open so
    many files, for at the system's limit nobody would give way. Each takes one; under TLS as many more may be on their
    way, whose handshake is not over."""
    files_each = 1 if settings.tls_cert is None else 2
    wanted = settings.max_connections * files_each + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return settings.max_connections
    allowed = max(1, min(settings.max_connections, (soft - min(SPARE_FILES, soft // 2)) // files_each))
    told = {"open_files": soft, "max_connections": allowed, "wanted": settings.max_connections}
    logger.warning("the system's limit of open files leaves fewer connections", extra={"fields": told})
    return allowed


def serve(
    settings: Settings,
    make_engine: Callable[[], Engine],
    listener: socket.socket,
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None,
) -> int:
    """Serve until told to end; returns the exit code. Raises StartError."""
    check_tls(settings)

    async def main() -> int:
        return await Lifecycle(settings, make_engine(), listener).run()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(main())


def process_started_s() -> float:
    """time.monotonic() at the moment the process was created; where the system does not tell, now."""
    now = time.monotonic()
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return now
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return now - age_s


def leave(code: int, *, died: bool = False) -> None:
    """End the process. A compute thread that is still in native code would make a normal exit wait or crash, and so
    may, if the engine died, what the interpreter takes apart on its way out: memory of a device that is lost."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk, or nobody reads: the exit code must not depend on it
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    logging.shutdown()
    if died or any(thread.name == "pagemill-engine" and thread.is_alive() for thread in threading.enumerate()):
        os._exit(code)
    sys.exit(code)
