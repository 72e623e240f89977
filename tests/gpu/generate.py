"""The requests of tests/gpu/served.py through plain transformers: `generate` in padded batches, then its continuous
batching, `generate_batch`.

    python -m tests.gpu.generate padded|continuous [--out FOLDER] [--dry]

The same model, made on the device with transformers' own random weights; bfloat16, torch's attention. Padded: one
batch of 256 rows, one of 64, and two of "medium", the largest that fit the memory the weights leave, sorted by length;
only tokens that were asked for count. The aim of ten times as much at 256 streams is held against the batches of 256.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from loadtest.baselines.transformers_generate import run_batch
from loadtest.padded import Batch, plan_batches
from loadtest.workloads import PlannedRequest
from tests.gpu.place import Place, open_place
from tests.gpu.served import WORKLOADS, requests_of

RATIO_AIM = 10.0
MOST_ROWS = 256
TINY_CACHE = {"num_blocks": 16, "max_batch_tokens": 256}  # transformers finds no size for itself on some CPUs
HEADROOM = 0.8  # of the memory the weights leave; generate concatenates, so a step holds a layer's K and V twice


def make_model(place: Place) -> Any:
    config = AutoConfig.from_pretrained(place.model)
    with torch.device(place.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    return model.eval()


def ids_of(request: PlannedRequest) -> list[int]:
    assert isinstance(request.prompt, tuple)
    return list(request.prompt)


def kv_tokens(place: Place, model: Any) -> int:
    """Tokens whose K and V fit beside the weights."""
    config = model.config
    per_token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 2
    free = (1 << 26) if place.is_dry else torch.cuda.mem_get_info()[0]
    return int(free * HEADROOM / per_token)


def padded_rate(place: Place, model: Any, batches: Sequence[Batch]) -> tuple[float, float]:
    """(useful tokens per second, share of the rows' steps that were useful)."""
    place.synchronize()
    start = time.perf_counter()
    for batch in batches:
        run_batch(model, [ids_of(request) for request in batch.requests], batch.max_new_tokens, "dynamic")
    place.synchronize()
    took = time.perf_counter() - start
    useful = sum(batch.useful_tokens for batch in batches)
    return useful / took, useful / sum(len(batch.requests) * batch.max_new_tokens for batch in batches)


def padded(place: Place) -> None:
    model = make_model(place)
    room = kv_tokens(place, model)
    run_batch(model, [[11, 12, 13], [14]], 4, "dynamic")
    rows = place.sized(MOST_ROWS, 4)
    for name, num_batches in (("W5 x 256", 1), ("W5 x 64", 1), ("medium x 256", 2)):
        requests = requests_of(place, name)
        batches = plan_batches(requests, min(rows, WORKLOADS[name].concurrency), room)[:num_batches]
        rate, useful = padded_rate(place, model, batches)
        tell_ratio(place, "generate", name, rate, f"{len(batches[0].requests)} rows, {useful:.0%} of them useful")


def tell_ratio(place: Place, way: str, name: str, rate: float, note: str) -> None:
    """Its rate, and the served rate as a multiple of it."""
    tell = place.results.tell
    tell(f"{way} {name}", rate, "tok/s", note=note)
    served = place.results.value(f"served {name}", 0.0)
    if served:
        aim = RATIO_AIM if name.endswith("256") and way == "generate" and not place.is_dry else None
        tell(f"served over {way}, {name}", served / rate, "x", aim=aim)


def continuous(place: Place) -> None:
    """All requests at once, from the first token to the last: what it does before its first token is its start."""
    model = make_model(place)
    for name in place.sized(("W5 x 256", "medium x 256"), ("W5 x 256",)):
        requests = requests_of(place, name)[:512]
        rate = continuous_rate(model, requests, place.sized(None, ContinuousBatchingConfig(**TINY_CACHE)))
        tell_ratio(place, "generate_batch", name, rate, f"{len(requests)} requests")


def continuous_rate(model: Any, requests: Sequence[PlannedRequest], cache: Any) -> float:
    """Output tokens per second. Every request gets the longest output, as the call knows one length only; what was not
    asked for does not count. cache: its own settings; None: it sizes its cache by the device's memory."""
    longest = max(request.max_tokens for request in requests)
    config = GenerationConfig(max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0)
    start = time.perf_counter()
    found = model.generate_batch(
        inputs=[ids_of(request) for request in requests], generation_config=config, progress_bar=False,
        record_timestamps=True, continuous_batching_config=cache,
    )  # fmt: skip
    wall = time.perf_counter() - start
    outputs = list(found.values())
    if len(outputs) != len(requests) or any(len(output.generated_tokens) != longest for output in outputs):
        raise RuntimeError(f"generate_batch gave {len(outputs)} of {len(requests)} outputs, or short ones")
    moments = [moment for output in outputs for moment in (getattr(output, "timestamps", None) or ())]
    seconds = max(moments) - min(moments) if moments else wall
    return sum(request.max_tokens for request in requests) / seconds


if __name__ == "__main__":
    way = sys.argv[1]
    {"padded": padded, "continuous": continuous}[way](open_place(f"generate, {way}", __doc__, sys.argv[2:]))
