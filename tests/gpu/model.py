"""Llama-3-8B's shape with dummy weights in this process: decode tokens per second against the roofline, and where a
step's time goes.

    python -m tests.gpu.model [--out FOLDER] [--dry]

The rate is that of tokens two runs differ in, so prompts and the first steps are not in it. Roofline: per step the
weights of all layers and the head once, K and V of every sequence once, at the rate of copying memory; or the products
at the rate of torch's, whichever takes longer.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch

from engine.llm import LLM
from engine.sampling_params import SamplingParams
from tests.gpu.place import Place, open_place
from tests.gpu.profiling import Profile, profiled

BATCHES, PROMPT = (256, 64, 16, 1), 64  # sequences; tokens of each prompt
SHORT, LONG = 16, 144  # tokens of the two outputs


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


def open_model(place: Place) -> LLM:
    settings: dict[str, object] = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_chunk_tokens": 2048}
    if place.is_dry:
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "memory_bytes": 16 << 20}
    return LLM(str(place.model), load_format="dummy", dtype="bfloat16", device=place.device, **settings)


class Runs:
    """Equal batches of prompts that no earlier batch began with."""

    def __init__(self, model: LLM, prompt: int, vocab_size: int) -> None:
        self.model, self.prompt, self.vocab_size = model, prompt, vocab_size
        self.random = Random(0)

    def seconds(self, num_seqs: int, max_tokens: int) -> float:
        """Until all of a batch are done."""
        prompts = [self.random.choices(range(10, self.vocab_size), k=self.prompt) for _ in range(num_seqs)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        start = time.perf_counter()
        outputs = self.model.generate(prompts, params, use_tqdm=False)
        took = time.perf_counter() - start
        counts = {len(completion.token_ids) for (completion,) in outputs}
        if counts != {max_tokens}:
            raise RuntimeError(f"outputs of {sorted(counts)} tokens instead of {max_tokens}")
        return took


def decode_rates(place: Place, runs: Runs, shape: Shape, batches: Sequence[int]) -> None:
    short, long = place.sized((SHORT, LONG), (2, 6))
    for num_seqs in batches:
        runs.seconds(num_seqs, short)  # graphs of this size are captured, if they are captured late
        pairs = [(runs.seconds(num_seqs, short), runs.seconds(num_seqs, long)) for _ in range(place.sized(2, 1))]
        took = min(two for _, two in pairs) - min(one for one, _ in pairs)
        took = max(took, 1e-9)  # dry, two runs take what they take
        rate = num_seqs * (long - short) / took
        floor = num_seqs / shape.step_seconds(place, num_seqs, runs.prompt + (short + long) / 2)
        place.results.tell(
            f"decode, batch {num_seqs}", rate, "tok/s", share=rate / floor, of="roofline",
            note=f"{took / (long - short) * 1e3:.2f} ms a step, the roofline {num_seqs / floor * 1e3:.2f}",
        )  # fmt: skip


def where_time_goes(place: Place, runs: Runs, num_seqs: int) -> None:
    """Of decode steps, prompts included: share of the wall time in kernels of each kind, and without any."""
    max_tokens = place.sized(48, 4)
    profile: Profile = profiled(place.device, lambda: runs.seconds(num_seqs, max_tokens))
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
    with open_model(place) as model:
        place.results.tell("from nothing to loaded", time.perf_counter() - begun, "s")
        runs = Runs(model, place.sized(PROMPT, 8), config["vocab_size"])
        batches = place.sized(BATCHES, (3, 1))
        decode_rates(place, runs, Shape.of(config), batches)
        if not place.is_dry:
            place.results.tell("memory, most of it", torch.cuda.max_memory_allocated() / 2**30, "GiB")
        for num_seqs in place.sized((256, 16), (3,)):
            where_time_goes(place, runs, num_seqs)


if __name__ == "__main__":
    main()
