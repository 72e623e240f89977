"""Live-slot utilisation on the shape of workload W2: 64 requests, 16 at a time, mixed lengths."""

from __future__ import annotations

from random import Random

import pytest

from engine.batch import RowOutput, StepOutput
from engine.config import SchedulerConfig
from engine.kv.manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Request
from engine.stats import CacheStats
from loadtest.lengths import lognormal_between


def serve(lengths: list[tuple[int, int]], concurrency: int) -> CacheStats:
    """Closed loop: as many requests (prompt, output tokens) at a time as concurrency says, no text shared."""
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(700, 16), 2048)
    pending = list(enumerate(lengths))
    num_active = 0
    while pending or scheduler.has_work:
        while pending and num_active < concurrency:
            stream, (num_prompt, num_output) = pending.pop(0)
            random = Random(stream)
            prompt = [random.randrange(50_000) for _ in range(num_prompt)]
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            scheduler.add(Request(stream, 0, prompt, params, seed=0))
            num_active += 1
        batch = scheduler.schedule(0.0)
        assert batch is not None
        rows = tuple(RowOutput() if r.logits_from is None else RowOutput((5,), (-1.0,)) for r in batch.rows)
        num_active -= len(scheduler.update(batch, StepOutput(batch.step_id, rows), 0.0).finished)
    return scheduler.step_stats().cache


@pytest.mark.parametrize("seed", range(3))
def test_at_least_95_percent_on_mixed_lengths(seed: int) -> None:
    random = Random(seed)
    inputs, outputs = lognormal_between(32, 512), lognormal_between(16, 256)
    stats = serve([(inputs.draw(random), outputs.draw(random)) for _ in range(64)], 16)
    assert stats.live_slot_steps_total / stats.used_slot_steps_total >= 0.95
    assert 0.9 <= stats.min_utilization < 1.0


def test_short_requests_lose_about_half_a_block_each() -> None:
    stats = serve([(25, 25)] * 64, 16)
    assert 0.8 < stats.live_slot_steps_total / stats.used_slot_steps_total < 0.9
