"""What the status page shows: one frame for all who watch, every TICK_S seconds, and nothing while nobody does.

A viewer that is slow misses frames; none is kept for it. The numbers are those of /metrics; the map and the sequences
are a picture that the engine paints between two steps when it is asked (`engine/painter.py`).
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import orjson

from engine.outputs import Delivery, NotServing, Phase
from engine.stats import Picture, SequenceView
from server.dashboard.window import Sample, Window
from server.engine_port import Engine
from server.metrics import Metrics
from server.protocol.errors import RATE_LIMITED, ApiError

TICK_S = 0.5
MAX_VIEWERS = 16
MAX_ADAPTERS = 20  # to choose from in the chat box
DIGITS = 6


class Feed:
    """One application's.

    names: those that the model answers to, once they are known. adapters: those of adapters."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        names: Sequence[str],
        adapters: Sequence[str] = (),
        *,
        tick_s: float = TICK_S,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._names = names
        self._adapters = list(adapters[:MAX_ADAPTERS])
        self._tick_s = tick_s
        self._window = Window()
        self._picture: Picture | None = None
        self._num_viewers = 0
        self._frame = b""
        self._fresh = asyncio.Event()  # of the next frame
        self._producer: asyncio.Task[None] | None = None
        engine.add_listener(self._keep_picture)

    @property
    def is_idle(self) -> bool:
        """Nobody watches, and nothing is done for it."""
        return self._producer is None or self._producer.done()

    def enter(self) -> None:
        """One more viewer; `leave` must follow. Raises ApiError 429."""
        if self._num_viewers >= MAX_VIEWERS:
            told = f"{MAX_VIEWERS} status pages are open, as many as may be."
            raise ApiError(429, told, code=RATE_LIMITED, headers={"Retry-After": "5"})
        self._num_viewers += 1

    def leave(self) -> None:
        self._num_viewers -= 1

    async def frames(self) -> AsyncIterator[bytes]:
        """Events, for one who has entered. Ends when the engine is dead, or drains and has nothing left to do: an open
        page does not hold up the end."""
        if self.is_idle:
            self._window.clear()
            self._picture = None
            self._producer = asyncio.create_task(self._produce())
        while True:
            fresh = self._fresh
            await fresh.wait()
            if self.is_idle:
                return
            yield self._frame
            if self._is_over():
                return

    async def _produce(self) -> None:
        try:
            while self._num_viewers:
                self._engine.paint()
                now = time.monotonic()
                self._window.add(Sample.of(self._metrics, now))
                self._frame = b"data: " + orjson.dumps(self.facts()) + b"\n\n"
                self._announce()
                await asyncio.sleep(self._tick_s)
        finally:  # also where it failed: nobody waits for what will not come
            asyncio.get_running_loop().call_soon(self._announce)

    def _announce(self) -> None:
        fresh, self._fresh = self._fresh, asyncio.Event()
        fresh.set()

    def _is_over(self) -> bool:
        phase, step = self._engine.phase, self._metrics.step
        return phase is Phase.DEAD or (phase is Phase.DRAINING and not step.num_running and not step.num_waiting)

    def _keep_picture(self, delivery: Delivery) -> None:
        """Listener of `Engine.add_listener`."""
        if delivery.picture is not None:
            self._picture = delivery.picture

    # -- a frame

    def facts(self) -> dict[str, Any]:
        """A frame, ready for JSON. Times are seconds. Once `_window` has a sample."""
        metrics, step = self._metrics, self._metrics.step
        cache, picture = step.cache, self._picture
        ttft, itl = self._window.percentiles(metrics.histograms)
        return {
            "phase": "hung" if self._engine.phase is Phase.READY and self._engine.hung else self._engine.phase.value,
            "uptime": round(time.time() - metrics.started_s),
            "model": self._model(),
            "running": step.num_running,
            "waiting": step.num_waiting,
            "rates": {name: _rounded(rate) for name, rate in self._window.rates().items()},
            "ttft": [_rounded(seconds) for seconds in ttft],
            "itl": [_rounded(seconds) for seconds in itl],
            "hit_rate": _rounded(self._window.hit_rate()),
            "finished": sum(metrics.finished.values()),
            "preemptions": step.num_preemptions_total,
            "blocks": {
                "total": cache.num_blocks,
                "used": cache.num_used_blocks,
                "cached": cache.num_cached_blocks,
                "shared": cache.num_shared_blocks,
                "evicted": cache.evictions_total,
                "copied": cache.block_copies_total,
            },
            "map": None if picture is None else base64.b64encode(picture.cells).decode(),
            "blocks_per_cell": 1 if picture is None else picture.blocks_per_cell,
            "sequences": [] if picture is None else _rows(picture),
            "errors": self._errors(),
        }

    def _model(self) -> dict[str, Any] | None:
        try:
            info = self._engine.model_info
        except NotServing:
            return None
        return {
            "name": self._names[0] if self._names else info.name,
            "adapters": self._adapters,
            "architecture": info.architecture,
            "parameters": info.num_parameters,
            "dtype": info.dtype,
            "quantization": info.quantization,
            "max_model_len": info.max_model_len,
            "block_size": info.block_size,
            "kv_bytes_per_token": info.kv_bytes_per_token,
        }

    def _errors(self) -> list[dict[str, Any]]:
        """Newest first. Nothing that a client wrote but its name for its request, which is short and clean."""
        now = time.time()
        return [
            {"age": round(now - note.time_s), "status": note.status, "route": note.route, "id": note.request_id}
            for note in reversed(self._metrics.recent_errors)
        ]


def _rows(picture: Picture) -> list[dict[str, Any]]:
    return [*_told(picture.running, "running"), *_told(picture.waiting, "waiting")]


def _told(views: Iterable[SequenceView], state: str) -> Iterable[dict[str, Any]]:
    for view in views:
        yield {
            "id": f"{view.stream_id}.{view.prompt_index}.{view.choice_index}",
            "state": state,
            "prompt": view.num_prompt_tokens,
            "computed": min(view.num_computed_tokens, view.num_prompt_tokens),
            "cached": view.num_cached_tokens,
            "output": view.num_output_tokens,
            "max_output": view.max_output_tokens,
            "blocks": view.num_blocks,
            "preempted": view.num_preemptions,
            "age": round(view.age_s, 1),
            **({"adapter": view.adapter} if view.adapter else {}),
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, DIGITS)
