"""`EngineLoop`: the engine thread. Inbox -> schedule -> execute -> update -> one hand-over, until told to stop.

It alone touches sequences, blocks and the device. It talks to the outside in two places: `post()` puts frozen
commands in, `deliver` gets one frozen `Delivery` per step out. An exception inside a step ends the sequences of
that step and nothing else; an exception anywhere else is a bug of ours and ends the engine, loudly. So does an error
after which the device computes no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import ScheduledBatch, StepOutput
from engine.device import give_back_memory, is_fatal, is_out_of_memory
from engine.outputs import Delivery
from engine.painter import Painter
from engine.scheduler import Scheduler
from engine.sequence import Request
from engine.stats import Picture, RequestStats, StepStats
from engine.step import Changes

logger = logging.getLogger("pagemill.engine")


@dataclass(frozen=True, slots=True)
class Submit:
    """All prompts of one HTTP request; they enter the waiting queue together."""

    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """End a stream, or one sequence of it that the assembler found complete; nothing more of it is delivered."""

    stream_id: int
    sequence: tuple[int, int] | None = None  # (prompt_index, choice_index); None: all, their reader has left


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """What comes after it finds nothing of what was computed before."""


@dataclass(frozen=True, slots=True)
class Paint:
    """Somebody watches: a delivery with a picture, please."""


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submit | Abort | ResetPrefixCache | Paint | Stop


class Handle(Protocol):
    def result(self) -> StepOutput: ...


class Runner(Protocol):
    def launch(self, batch: ScheduledBatch) -> Handle: ...


@dataclass(slots=True)
class Flight:
    """A launched step that has not been updated yet."""

    batch: ScheduledBatch
    handle: Handle
    schedule_s: float
    execute_s: float


class EngineLoop(threading.Thread):
    """start() loads through `load` in the thread itself, then serves until `Stop`.

    on_ready and on_death are called from this thread; so is deliver."""

    def __init__(
        self,
        load: Callable[[], tuple[Runner, Scheduler]],
        *,
        deliver: Callable[[Delivery], None],
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        super().__init__(name="pagemill-engine", daemon=True)
        self._load = load
        self._deliver = deliver
        self._on_ready = on_ready
        self._on_death = on_death
        self._inbox: deque[Command] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._lacked_memory = False
        self._in_flight: deque[Flight] = deque()
        self.step_started_s: float | None = None  # read by the event loop: a step that hangs shows here

    def post(self, command: Command) -> None:
        """Thread-safe; never blocks. The bound of the inbox is kept at admission."""
        self._inbox.append(command)
        self._wake.set()

    def run(self) -> None:
        try:
            self._runner, self._scheduler = self._load()
            self._painter = Painter(self._scheduler)
            self._hand_over(Changes())  # gauges know the pool before the first step
            self._on_ready()
            with torch.inference_mode():  # once: to enter it in every step takes 40 us where the caches are cold
                while not self._stopping:
                    self._receive()
                    self._step()
        except BaseException as error:  # the single handler: whatever happened, waiting clients must hear of it
            self._on_death(error)
            if is_fatal(error):
                return  # to free what lies on a device that is lost may end the process before anybody has been told
        self._let_go()

    def _let_go(self) -> None:
        """The thread is over: the model's memory does not wait for those who still hold the thread, or for the garbage
        collector to find the circle of callbacks."""
        self._in_flight.clear()
        for name in ("_runner", "_scheduler", "_painter", "_load", "_deliver", "_on_ready", "_on_death"):
            self.__dict__.pop(name, None)

    def _receive(self) -> None:
        """Wait until there is something to do, then empty the inbox."""
        if not self._scheduler.has_work:
            self._wake.wait()
        self._wake.clear()
        ended: list[RequestStats] = []
        while self._inbox:
            command = self._inbox.popleft()
            match command:
                case Submit(requests):
                    for request in requests:
                        self._scheduler.add(request)
                case Abort(stream_id, None):
                    ended += self._scheduler.abort(stream_id, now=time.monotonic()).finished
                case Abort(stream_id, (prompt, choice)):
                    ended += self._scheduler.abort(
                        stream_id, prompt, choice, now=time.monotonic(), reason="stop"
                    ).finished
                case ResetPrefixCache():
                    self._scheduler.reset_prefix_cache()
                    self._hand_over(Changes())
                case Paint():
                    self._hand_over(Changes(), self._painter.paint(time.monotonic()))
                case Stop():
                    self._stopping = True
        if ended:  # gauges and counters must not wait for a step that may never follow
            self._hand_over(Changes(finished=tuple(ended)))

    def _step(self) -> None:
        """schedule -> execute -> update -> deliver. Raises what is_fatal knows."""
        if self._lacked_memory:
            self._lacked_memory = False
            give_back_memory()  # only here the failed step's tensors are gone: its error held them
        started = time.monotonic()
        batch = self._scheduler.schedule(started)
        if batch is not None:
            self.step_started_s = started
            scheduled = time.monotonic()
            try:
                handle = self._runner.launch(batch)
            except Exception as error:
                if is_fatal(error):
                    raise
                self._retire_all()
                self._fail(batch, error)
                return
            self._in_flight.append(Flight(batch, handle, scheduled - started, time.monotonic() - scheduled))
        if self._in_flight and (batch is None or len(self._in_flight) >= self._scheduler.pipeline_depth):
            self._retire(self._in_flight.popleft())
        if not self._in_flight:
            self.step_started_s = None

    def _retire_all(self) -> None:
        while self._in_flight:
            self._retire(self._in_flight.popleft())

    def _retire(self, flight: Flight) -> None:
        waited = time.monotonic()
        try:
            output = flight.handle.result()
        except Exception as error:
            self._fail(flight.batch, error)
            return
        updated = time.monotonic()
        changes = self._scheduler.update(flight.batch, output, updated)
        ended = time.monotonic()
        step = self._scheduler.step_stats()._replace(
            schedule_s=flight.schedule_s,
            execute_s=flight.execute_s + updated - waited,
            update_s=ended - updated,
            forward_s=output.forward_s,
            sampling_s=output.sampling_s,
            handed_s=ended,
        )
        self._hand_over(changes, step=step)

    def _fail(self, batch: ScheduledBatch, error: Exception) -> None:
        """Containment: the sequences of this step end with an error, everybody else goes on. Raises the error if the
        device is lost with it; the engine's death then tells all."""
        if is_fatal(error):
            raise error
        self._lacked_memory = is_out_of_memory(error)
        logger.error("step %d failed; its requests end with an error", batch.step_id, exc_info=error)
        self.step_started_s = None
        message = "The engine failed while computing this request."
        if self._lacked_memory:
            message = "The engine ran out of memory while computing this request."
        self._hand_over(self._scheduler.fail_step(batch, message, time.monotonic()))

    def _hand_over(self, changes: Changes, picture: Picture | None = None, step: StepStats | None = None) -> None:
        """step: what there is to tell of one; None: gauges alone."""
        step = step or self._scheduler.step_stats()
        self._deliver(Delivery(changes.outputs, step, changes.finished, changes.started, picture))
