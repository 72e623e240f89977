"""Preemption on a schedule: every running sequence loses its blocks again and again."""

from __future__ import annotations

from dataclasses import replace

from engine.assembly import EngineParts, load_engine
from engine.batch import ScheduledBatch
from engine.config import EngineConfig
from engine.scheduler import Scheduler


class PreemptingScheduler(Scheduler):
    """Preempts every running sequence each time `period` steps have passed."""

    period = 9
    num_calls = 0

    def schedule(self, now: float) -> ScheduledBatch | None:
        self.num_calls += 1
        if self.num_calls % self.period == 0:
            self.preempt_all()
        return super().schedule(now)


def load_preempting(config: EngineConfig) -> EngineParts:
    """As load_engine, with the scheduler above."""
    parts = load_engine(config)
    plain = parts.scheduler
    scheduler = PreemptingScheduler(config.scheduler, plain.manager, parts.info.max_model_len)
    return replace(parts, scheduler=scheduler)
