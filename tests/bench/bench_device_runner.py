"""What a decode step costs the host besides the model and the kernels: launch + result of the device's runner.

    python -m tests.bench.bench_device_runner [--sequences 1 64 256] [--steps 300]

Prints microseconds of thread CPU time per step, ModelRunner's beside them. The model answers with constant logits over
a tiny vocabulary, and kernels of their own are left out: what is timed is gathering, packing and reading.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor

from engine import device_ops, ops
from engine.batch import NewBlocks, NewRow, ScheduledBatch, ScheduledRow
from engine.device import HostLane
from engine.device_runner import DeviceRunner
from engine.kv.cache import KVCache
from engine.models.backbone import Backbone
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams

VOCAB, PROMPT, MAX_LEN = 64, 8, 2048
KERNELS = ("prepare_batch", "store_tokens", "apply_penalties", "load_counts", "count_tokens", "add_bias")
KINDS = {
    "plain": SamplingParams(max_tokens=None, seed=1),
    "penalties": SamplingParams(max_tokens=None, seed=1, presence_penalty=1.0),
    "logprobs": SamplingParams(max_tokens=None, seed=1, logprobs=5),
}


class Constant:
    """A backbone without layers."""

    tells_hidden_states = True

    def __init__(self, num_sequences: int) -> None:
        self._logits = torch.randn(num_sequences, VOCAB)

    def forward(
        self, input_ids: Tensor, positions: Tensor, metadata: object, wanted: Tensor, spans: object = ()
    ) -> Tensor:
        return self._logits[: len(wanted)].clone()


def runners(num_sequences: int) -> dict[str, ModelRunner | DeviceRunner]:
    backbone = cast("Backbone", Constant(num_sequences))
    cache = KVCache([], 2 * num_sequences, 16, torch.float32)
    sizes: dict[str, Any] = dict(max_num_seqs=num_sequences, max_model_len=MAX_LEN, vocab_size=VOCAB)
    return {
        "ModelRunner": ModelRunner(backbone, cache, **sizes),
        "DeviceRunner": DeviceRunner(backbone, cache, HostLane(), max_num_batched_tokens=8192, **sizes),
    }


def batches_of(num_sequences: int, steps: int, params: SamplingParams) -> list[ScheduledBatch]:
    """All prompts, then one token of every sequence per step; every 16th takes a block."""
    rows = range(num_sequences)
    first = ScheduledBatch(
        step_id=0,
        new_rows=tuple(NewRow(i, (3,) * PROMPT, PROMPT, ((i,),), params, i, ()) for i in rows),
        rows=tuple(ScheduledRow(i, 0, PROMPT, i) for i in rows),
    )
    return [
        first,
        *(
            ScheduledBatch(
                step_id=step,
                new_blocks=tuple(NewBlocks(i, 0, step // 16, (i,)) for i in rows if (i + step) % 16 == 0),
                rows=tuple(ScheduledRow(i, PROMPT + step - 1, 1, i) for i in rows),
            )
            for step in range(1, steps + 1)
        ),
    ]


def microseconds(runner: ModelRunner | DeviceRunner, batches: list[ScheduledBatch]) -> float:
    first, *others = batches
    runner.launch(first).result()
    started = time.thread_time()
    for batch in others:
        runner.launch(batch).result()
    return (time.thread_time() - started) / len(others) * 1e6


@contextmanager
def without_kernels() -> Iterator[None]:
    def sample(logits: Tensor, *_: Tensor, **edits: object) -> Tensor:
        return torch.zeros(len(logits), dtype=torch.int64)

    def nothing(*_: object) -> None:
        return None

    with ExitStack() as patches:
        patches.enter_context(patch.object(ops, "sample", sample))
        for name in KERNELS:
            patches.enter_context(patch.object(device_ops, name, nothing))
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with without_kernels():
        for count in options.sequences:
            for kind, params in KINDS.items():
                batches = batches_of(count, options.steps, params)
                times = {name: microseconds(runner, batches) for name, runner in runners(count).items()}
                told = ", ".join(f"{name} {value:.0f}" for name, value in times.items())
                print(f"{count} sequences, {kind}: {told} us")


if __name__ == "__main__":
    main()
