"""An engine's steps one after another in this thread, as engine/loop.py makes them, without inbox, delivery and text:
what a model can do at most, and what of it is the host's time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engine.assembly import EngineParts
from engine.batch import ScheduledBatch
from engine.loop import Handle
from engine.sampling_params import SamplingParams
from engine.sequence import Request


@dataclass(slots=True)
class Step:
    """retired_s: of time.perf_counter, when its tokens were known. The others are seconds of the host: planning it,
    launching it, waiting for it, making something of its tokens."""

    num_rows: int
    num_tokens: int
    schedule_s: float
    launch_s: float
    wait_s: float = 0.0
    update_s: float = 0.0
    retired_s: float = 0.0


class Stepper:
    def __init__(self, parts: EngineParts) -> None:
        self._runner, self._scheduler = parts.runner, parts.scheduler
        self._streams = 0
        self._in_flight: deque[tuple[ScheduledBatch, Handle, Step]] = deque()

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams) -> list[Step]:
        """All prompts at once, until the last one's output ends. Raises RuntimeError for a row that fails."""
        for prompt in prompts:
            self._scheduler.add(Request(self._streams, 0, prompt, params, seed=self._streams))
            self._streams += 1
        steps: list[Step] = []
        while True:
            batch = self._launch()
            if self._in_flight and (batch is None or len(self._in_flight) >= self._scheduler.pipeline_depth):
                steps.append(self._retire())
            elif batch is None:
                return steps

    def _launch(self) -> ScheduledBatch | None:
        started = time.perf_counter()
        batch = self._scheduler.schedule(time.monotonic())
        scheduled = time.perf_counter()
        if batch is not None:
            handle = self._runner.launch(batch)
            took = time.perf_counter() - scheduled
            step = Step(len(batch.rows), batch.num_tokens, scheduled - started, took)
            self._in_flight.append((batch, handle, step))
        return batch

    def _retire(self) -> Step:
        batch, handle, step = self._in_flight.popleft()
        started = time.perf_counter()
        output = handle.result()
        step.retired_s = time.perf_counter()
        step.wait_s = step.retired_s - started
        errors = [row.error for row in output.rows if row.error]
        if errors:
            raise RuntimeError(f"{len(errors)} rows failed: {errors[0]}")
        self._scheduler.update(batch, output, time.monotonic())
        step.update_s = time.perf_counter() - step.retired_s
        return step


def decode_steps(steps: Sequence[Step], num_seqs: int) -> list[Step]:
    """Those that computed one token of every sequence and nothing else."""
    return [step for step in steps if step.num_rows == step.num_tokens == num_seqs]


def seconds_per_step(steps: Sequence[Step]) -> float:
    """From the first to the last of at least two steps that followed each other."""
    return (steps[-1].retired_s - steps[0].retired_s) / (len(steps) - 1)
