"""The scheduler's steps in flight: numbered when they leave, retired in the order they left."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from engine.batch import ScheduledBatch, StepOutput
from engine.step import StepPlan

NO_STEP = StepPlan(0.0, 0)


class Pipeline:
    """depth: steps that may be in flight."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._steps: deque[StepPlan] = deque()
        self._next_id = self._retired_id = 0
        self._retired: StepPlan | None = None  # the last one, until it is told of

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepPlan]:
        return iter(self._steps)

    def enter(self, step: StepPlan) -> None:
        """Give a step its number; it is in flight."""
        step.step_id = self._next_id
        self._next_id += 1
        self._steps.append(step)

    def retire(self, batch: ScheduledBatch, output: StepOutput) -> StepPlan:
        """The oldest step, whose answer has come. Raises RuntimeError if the answer is not of that step."""
        step = self._steps[0] if self._steps else None
        if step is None or not step.step_id == batch.step_id == output.step_id:
            raise RuntimeError(f"step {batch.step_id}, answered as {output.step_id}, is not the oldest in flight")
        if len(output.rows) != len(step.rows):
            raise RuntimeError(f"step {batch.step_id} has {len(step.rows)} rows, the answer {len(output.rows)}")
        self._retired, self._retired_id = self._steps.popleft(), step.step_id
        return step

    def drop(self, batch: ScheduledBatch) -> StepPlan:
        """A step, the oldest or a later one, that came to nothing. Raises RuntimeError if it is not in flight."""
        step = next((s for s in self._steps if s.step_id == batch.step_id), None)
        if step is None:
            raise RuntimeError(f"step {batch.step_id} is not in flight")
        self._steps.remove(step)
        return step

    def take_retired(self) -> tuple[int, StepPlan]:
        """The last retired step and its number; each step is told once, then an empty one stands for it."""
        step, self._retired = self._retired or NO_STEP, None
        return self._retired_id, step
