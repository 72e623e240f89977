"""Whole steps of a model in bfloat16 and quantised, interleaved: decodes of 1 to 64 sequences, and a prompt.

    python -m tests.bench.bench_quantised [--model MODEL] [--quantization none int8 auto] [--threads 1]

Milliseconds per step, the median of the rounds: CPU time of the calling thread with one thread (a busy machine does
not spoil it), wall time with more. Behind them what each gains over the first.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig
from engine.models.backbone import Backbone
from engine.models.loader import load_model
from engine.models.self_check import BLOCK_SIZE, PagedRun

PROMPT = 256


def load(model: str | None, quantization: str) -> Backbone:
    config = ModelConfig(model=model, dtype="bfloat16", quantization=quantization)  # type: ignore[arg-type]
    return load_model(config, DeviceConfig(), backend=NativeAttention()).backbone


class Steps:
    """`batch` sequences that hold PROMPT tokens each; every step appends `count` tokens to each of them."""

    def __init__(self, backbone: Backbone, batch: int, count: int, rounds: int) -> None:
        self._backbone, self._batch, self._count = backbone, batch, count
        length = PROMPT + count * (rounds + 1)
        self._run = PagedRun(backbone, num_blocks=batch * (length // BLOCK_SIZE + 1))
        self._positions = PROMPT
        self._run.metadata_for([(sequence, [5] * PROMPT) for sequence in range(batch)])
        for layer in backbone.layers:  # what the prompts would have left; its values do not matter
            for cache in (layer.key_cache, layer.value_cache):
                if cache is not None:
                    cache.normal_()

    def milliseconds(self, *, cpu: bool) -> float:
        ids = [7] * self._count
        metadata = self._run.metadata_for([(sequence, ids) for sequence in range(self._batch)])
        positions = torch.arange(self._positions, self._positions + self._count).repeat(self._batch)
        tokens, last = torch.tensor(ids * self._batch), torch.arange(1, self._batch + 1) * self._count - 1
        self._positions += self._count
        clock = time.thread_time if cpu else time.perf_counter
        start = clock()
        self._backbone.forward(tokens, positions, metadata, last)
        return (clock() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "auto"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    backbones = {choice: load(arguments.model, choice) for choice in arguments.quantization}
    for choice, backbone in backbones.items():
        print(f"{choice}: {backbone.quantization}, weights {backbone.weight_bytes / 2**20:.1f} MiB")
    for batch, count in ((1, 1), (4, 1), (16, 1), (64, 1), (1, 512)):
        rounds = arguments.rounds if count == 1 else 5
        steps = {choice: Steps(backbone, batch, count, rounds) for choice, backbone in backbones.items()}
        taken: dict[str, list[float]] = {choice: [] for choice in steps}
        for _ in range(rounds):
            for choice, step in steps.items():
                taken[choice].append(step.milliseconds(cpu=arguments.threads == 1))
        medians = {choice: statistics.median(values[1:]) for choice, values in taken.items()}
        first = next(iter(medians.values()))
        row = "  ".join(f"{choice} {ms:8.2f} ms {first / ms:5.2f}x" for choice, ms in medians.items())
        print(f"{batch:3d} x {count:3d} tokens  {row}", flush=True)


if __name__ == "__main__":
    main()
