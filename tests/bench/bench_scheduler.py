"""What a step costs besides the model: schedule + update with 64 sequences decoding, and admission of long prompts.

    python -m tests.bench.bench_scheduler [--sequences 64] [--steps 400]

Prints microseconds per step. The runner is replaced by a constant answer, so nothing but storey 1 is timed.
"""

from __future__ import annotations

import argparse
import time
from statistics import median, quantiles

from engine.batch import RowOutput, ScheduledBatch, StepOutput
from engine.config import SchedulerConfig
from engine.kv.manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Request

MAX_LEN = 4096


def answer(batch: ScheduledBatch) -> StepOutput:
    row, chunk = RowOutput((5,), (-1.0,)), RowOutput()
    return StepOutput(batch.step_id, tuple(chunk if r.logits_from is None else row for r in batch.rows))


def build(num_sequences: int, steps: int) -> Scheduler:
    config = SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=8192)
    per_sequence = -(-(512 + steps) // 16)
    num_blocks = max(num_sequences * per_sequence * 2, MAX_LEN // 16)
    return Scheduler(config, KVCacheManager(num_blocks, 16), MAX_LEN)


def time_decoding(num_sequences: int, steps: int) -> list[float]:
    """Seconds of schedule + update per step."""
    scheduler = build(num_sequences, steps)
    for stream in range(num_sequences):
        prompt = [stream * 7 + i for i in range(128)]
        params = SamplingParams(max_tokens=steps + 10, ignore_eos=True)
        scheduler.add(Request(stream, 0, prompt, params, seed=stream))
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        batch = scheduler.schedule(started)
        scheduled = time.perf_counter()
        assert batch is not None
        output = answer(batch)
        updating = time.perf_counter()
        scheduler.update(batch, output, updating)
        scheduler.step_stats()
        seconds.append(scheduled - started + time.perf_counter() - updating)
    return seconds[steps // 10 :]


def time_admission(num_prompts: int, length: int) -> list[float]:
    """Seconds of the step that admits one prompt of `length` tokens whose first half is cached."""
    scheduler = build(64, length)
    seconds = []
    for stream in range(num_prompts):
        prompt = list(range(length // 2)) + [stream + 1] * (length - length // 2)
        scheduler.add(Request(stream, 0, prompt, SamplingParams(max_tokens=1), seed=0))
        started = time.perf_counter()
        batch = scheduler.schedule(started)
        seconds.append(time.perf_counter() - started)
        while batch is not None:
            scheduler.update(batch, answer(batch), 0.0)
            batch = scheduler.schedule(0.0)
    return seconds[1:]


def report(name: str, seconds: list[float]) -> None:
    micros = [s * 1e6 for s in seconds]
    print(f"{name:44s} median {median(micros):8.0f} us   p99 {quantiles(micros, n=100)[98]:8.0f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    report(f"step, {options.sequences} sequences decoding", time_decoding(options.sequences, options.steps))
    report("admission of 2,048 tokens, half of them cached", time_admission(60, 2048))


if __name__ == "__main__":
    main()
