"""Llama-3-8B's shape with dummy weights in this process: decode tokens per second against the roofline, and where a
step's time goes.

    python -m tests.gpu.model [--out FOLDER] [--dry]

Steps are made one after another, without event loop and text (stepping.py); the rate is that of steps in which every
sequence decodes. Roofline: per step the weights of all layers and the head once, K and V of every sequence once, at
the rate of copying memory; or the products at the rate of torch's, whichever takes longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import torch

from engine.assembly import EngineParts, load_engine
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from tests.gpu.place import Place, open_place
from tests.gpu.profiling import profiled
from tests.gpu.stepping import Step, Stepper, decode_steps, seconds_per_step

BATCHES, PROMPT, OUTPUT = (256, 64, 16, 1), 64, 128  # sequences; tokens of each prompt and output


@dataclass(frozen=True, slots=True)
class Shape:
    """What a decode step reads and computes, from a Llama-like config.json."""

    weights: int  # numbers that a step multiplies by: all but the embedding
    kv_bytes: int  # of a token, all layers, 2 bytes a number

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        hidden, layers, dim = config["hidden_size"], config["num_hidden_layers"], config["head_dim"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        attention = hidden * dim * (2 * heads + 2 * kv_heads)
        per_layer = attention + 3 * hidden * config["intermediate_size"]
        return cls(layers * per_layer + hidden * config["vocab_size"], layers * 2 * kv_heads * dim * 2)

    def step_seconds(self, place: Place, num_seqs: int, context: float) -> float:
        read = (2 * self.weights + num_seqs * context * self.kv_bytes) / place.copy_rate()
        return max(read, 2 * self.weights * num_seqs / place.matmul_rate())


def open_model(place: Place) -> EngineParts:
    settings: dict[str, object] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_chunk_tokens": 2048}
    if place.is_dry:
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "memory_bytes": 16 << 20}
    config = EngineConfig.of(
        model=str(place.model), load_format="dummy", dtype="bfloat16", device=place.device, **settings
    )
    return load_engine(config)


class Runs:
    """Equal batches of prompts that no earlier batch began with, decoded greedily."""

    def __init__(self, parts: EngineParts, prompt: int) -> None:
        self.stepper, self.prompt, self.vocab_size = Stepper(parts), prompt, parts.info.vocab_size
        self.random = Random(0)

    def steps(self, num_seqs: int, max_tokens: int) -> list[Step]:
        prompts = [self.random.choices(range(10, self.vocab_size), k=self.prompt) for _ in range(num_seqs)]
        return self.stepper.run(prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def decode_rates(place: Place, runs: Runs, shape: Shape, batches: Sequence[int]) -> None:
    output = place.sized(OUTPUT, 6)
    for num_seqs in batches:
        runs.steps(num_seqs, place.sized(8, 2))  # what is made late is made now
        steps = decode_steps(runs.steps(num_seqs, output), num_seqs)
        took = seconds_per_step(steps)
        floor = shape.step_seconds(place, num_seqs, runs.prompt + output / 2)
        place.results.tell(
            f"decode, batch {num_seqs}", num_seqs / took, "tok/s", share=floor / took, of="roofline",
            note=f"{took * 1e3:.2f} ms a step, the roofline {floor * 1e3:.2f}; host: {host_parts(steps)}",
        )  # fmt: skip


def host_parts(steps: Sequence[Step]) -> str:
    """Mean milliseconds of each of a step's parts on the host."""
    parts = ("schedule", "launch", "wait", "update")
    return ", ".join(f"{part} {mean(getattr(step, f'{part}_s') for step in steps) * 1e3:.2f}" for part in parts)


def where_time_goes(place: Place, runs: Runs, num_seqs: int) -> None:
    """Of prompts and decode steps: share of the wall time in kernels of each kind, and without any."""
    max_tokens = place.sized(48, 4)
    profile = profiled(place.device, lambda: runs.steps(num_seqs, max_tokens))
    for kind, seconds in profile.seconds.items():
        place.results.tell(
            f"batch {num_seqs}: {kind}", seconds * 1e3, "ms", share=seconds / profile.wall, of="wall time",
            note=f"of {profile.wall * 1e3:.0f} ms",
        )  # fmt: skip
    (place.results.folder / f"profile-{num_seqs}.txt").write_text(profile.text)


def main() -> None:
    place = open_place("model", __doc__)
    config = json.loads(Path(place.model / "config.json").read_text())
    begun = time.perf_counter()
    parts = open_model(place)
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in parts.info.load_seconds.items())
    place.results.tell("from nothing to loaded", time.perf_counter() - begun, "s", note=phases)
    runs = Runs(parts, place.sized(PROMPT, 8))
    decode_rates(place, runs, Shape.of(config), place.sized(BATCHES, (3, 1)))
    if not place.is_dry:
        place.results.tell("memory, most of it", torch.cuda.max_memory_allocated() / 2**30, "GiB")
    for num_seqs in place.sized((256, 16), (3,)):
        where_time_goes(place, runs, num_seqs)


if __name__ == "__main__":
    main()
