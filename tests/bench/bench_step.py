"""What a step costs beside the model's forward, part by part: 64 sequences decode over a model that answers at once.

    python -m tests.bench.bench_step [--sequences 64] [--vocab 49152] [--threads 2] [--steps 300] [--weights 0]

With --weights the model reads so many MiB in every step, as one with weights does: whatever else a step looks at has
left the caches by then, as it has in a server.

Prints milliseconds per step, median and best: what the scheduler plans, what the runner prepares, draws and writes
down, what the scheduler makes of it. The logits are those of bench_sampler ("peaked" unless flat is asked for), drawn
anew by their positions in every step. What happens on the event loop's thread is not in it (bench_sse).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from engine import ops
from engine.config import SchedulerConfig
from engine.kv.cache import KVCache
from engine.kv.manager import KVCacheManager
from engine.models.backbone import Backbone
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Request
from tests.bench.bench_sampler import flat, peaked

PROMPT = 300
ASKED: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top-k 50, top-p 0.9": SamplingParams(temperature=0.8, top_p=0.9, top_k=50),
    "top-p 0.9, penalties": SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5),
    "top-p 0.9, 5 logprobs": SamplingParams(temperature=0.8, top_p=0.9, logprobs=5),
    "top-p 0.9, 5 of the drawn": SamplingParams(temperature=0.8, top_p=0.9, logprobs=5, logprobs_mode="processed"),
}


class NoModel:
    """Answers with the same logits, having read `weights`."""

    tells_hidden_states = False
    num_adapters = 0

    def __init__(self, logits: Tensor, weights: Tensor) -> None:
        self._logits, self._weights = logits, weights

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: object, logits_indices: Tensor, spans: object = ()
    ) -> Tensor:
        self._weights.sum()
        logits = self._logits[: len(logits_indices)]
        return logits.clone() if len(self._weights) else logits  # written last, as a head's product is


class NoCache:
    block_size = 16
    num_blocks = 1 << 14

    def copy_blocks(self, pairs: object) -> None:
        pass


def timing(owner: object, name: str, spent: dict[str, float]) -> None:
    """Add the time of every call of owner.name to spent[name]."""
    call: Callable[..., Any] = getattr(owner, name)

    def timed(*arguments: Any, **named: Any) -> Any:
        started = time.perf_counter()
        result = call(*arguments, **named)
        spent[name] += time.perf_counter() - started
        return result

    setattr(owner, name, timed)


def time_steps(logits: Tensor, weights: Tensor, params: SamplingParams, steps: int) -> dict[str, list[float]]:
    """Seconds of every part of every step but the first tenth."""
    num_sequences, vocab = logits.shape
    config = SchedulerConfig(max_num_seqs=num_sequences, max_num_batched_tokens=1 << 16, max_chunk_tokens=1 << 16)
    scheduler = Scheduler(config, KVCacheManager(NoCache.num_blocks, NoCache.block_size), 4096)
    runner = ModelRunner(
        cast(Backbone, NoModel(logits, weights)), cast(KVCache, NoCache()),
        max_num_seqs=num_sequences, max_model_len=4096, vocab_size=vocab,
    )  # fmt: skip
    for stream in range(num_sequences):
        own = SamplingParams(**{**{name: getattr(params, name) for name in params.__slots__}, "max_tokens": steps + 9})
        scheduler.add(Request(stream, 0, [stream * 7 + i for i in range(PROMPT)], own, seed=stream))
    spent: dict[str, float] = defaultdict(float)
    timing(runner, "_compute", spent)
    timing(runner.sampler, "_draw", spent)
    timing(runner.sampler, "sample", spent)
    parts: dict[str, list[float]] = defaultdict(list)
    for _ in range(steps):
        spent.clear()
        started = time.perf_counter()
        batch = scheduler.schedule(started)
        scheduled = time.perf_counter()
        assert batch is not None
        output = runner.launch(batch).result()
        launched = time.perf_counter()
        scheduler.update(batch, output, launched)
        scheduler.step_stats()
        updated = time.perf_counter()
        parts["schedule"].append(scheduled - started)
        parts["prepare"].append(launched - scheduled - spent["sample"] - spent["_compute"])
        parts["draw"].append(spent["_draw"])
        parts["tell"].append(spent["sample"] - spent["_draw"])
        parts["update"].append(updated - launched)
        parts["all"].append(updated - started - spent["_compute"])
    return {name: seconds[steps // 10 :] for name, seconds in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--weights", type=int, default=0, help="MiB that the model reads in every step")
    parser.add_argument("--flat", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logits = (flat if options.flat else peaked)(options.sequences, options.vocab)
    weights = torch.ones(options.weights << 18)
    shape = f"{options.sequences} sequences, {options.vocab} ids, {'flat' if options.flat else 'peaked'}"
    print(f"{ops.isa()}, torch {torch.__version__}, {options.threads} threads, {shape}: ms per step, median (best)")
    for name, params in ASKED.items():
        if options.only not in name:
            continue
        parts = time_steps(logits, weights, params, options.steps)
        told = "  ".join(f"{part} {statistics.median(s) * 1e3:.3f} ({min(s) * 1e3:.3f})" for part, s in parts.items())
        print(f"{name:26s} {told}", flush=True)


if __name__ == "__main__":
    main()
