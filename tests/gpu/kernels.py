"""How fast the other kernels are: copying blocks, linear layers, drawing tokens.

    python -m tests.gpu.kernels blocks|linear|sampler [--out FOLDER] [--dry]

Shapes are Llama-3-8B's. Weights that are read for few rows are held against the rate of copying memory, products of
many rows against torch's; torch's own linear layer stands beside ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from engine import ops
from tests.gpu.place import Place, measure, open_place

LAYERS, BLOCK_BYTES = 32, 2 * 8 * 16 * 128 * 2  # of one layer
COPY_AIM = 0.9  # of the copy rate
WEIGHTS = {  # rows, columns, whether the rows are a gate's and then as many others
    "qkv": (6144, 4096, False),
    "o": (4096, 4096, False),
    "gate and up": (28672, 4096, True),
    "down": (4096, 14336, False),
    "head": (128256, 4096, False),
}
FEW, MANY = (1, 16, 64), (256, 2048, 8192)
COLD_BYTES = 256 << 20  # of weights that take turns: several times the L2 cache
VOCAB = 128256


# ---- copy_blocks ----------------------------------------------------------------------------------------------------


def blocks(place: Place) -> None:
    """Whole blocks in every layer, from and to random places; bytes read and bytes written are both counted."""
    for count in place.sized((4, 64, 512, 2048), (3,)):
        num_blocks, layers = 2 * count, place.sized(LAYERS, 2)
        caches = [
            torch.ones(num_blocks, BLOCK_BYTES, dtype=torch.uint8, device=place.device) for _ in range(layers)
        ]  # fmt: skip
        pairs = torch.randperm(num_blocks, device=place.device).view(count, 2)
        seconds, how = measure(place, [partial(ops.copy_blocks, caches, pairs)])
        moved = 2 * count * layers * BLOCK_BYTES
        place.results.tell(
            f"copy_blocks {count} x {layers} layers", moved / seconds / 1e9, "GB/s",
            share=moved / seconds / place.copy_rate(), of="copy rate", aim=COPY_AIM if moved >= 64e6 else None,
            note=how or f"{moved / 1e6:.0f} MB",
        )  # fmt: skip
        del caches


# ---- linear ---------------------------------------------------------------------------------------------------------


def linear_calls(
    place: Place, rows: int, shape: tuple[int, int, bool]
) -> tuple[list[Callable[[], Tensor]], list[Callable[[], Tensor]]]:
    """(ours, torch's): each a call per weight. A gated one includes the activation, torch's does not."""
    features, columns, gated = shape
    count = place.sized(max(1, -(-COLD_BYTES // (features * columns * 2))), 1)
    weights = [
        torch.randn(features, columns, dtype=torch.bfloat16, device=place.device) * columns**-0.5 for _ in range(count)
    ]
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=place.device)
    packed = [ops.pack_linear(weight, gated=gated) for weight in weights]
    if gated:
        ours = [partial(ops.linear, x, each, None, features // 2, activation="silu") for each in packed]
    else:
        ours = [partial(ops.linear, x, each, None, features) for each in packed]
    return list(ours), [partial(torch.nn.functional.linear, x, each) for each in weights]


def linear(place: Place) -> None:
    shapes = place.sized(WEIGHTS, {"gate and up": (128, 64, True), "head": (96, 64, False)})
    for rows in place.sized((*FEW, *MANY), (1, 5)):
        for name, shape in shapes.items():
            if name == "head" and rows in MANY[1:]:
                continue  # logits are wanted of the last tokens only
            ours, theirs = linear_calls(place, rows, shape)
            seconds, how = measure(place, ours, 0.05)
            beside, _ = measure(place, theirs, 0.05)
            tell_linear(place, f"linear {name}, {rows} rows", rows, shape, seconds, how, beside)


def tell_linear(
    place: Place, what: str, rows: int, shape: tuple[int, int, bool], seconds: float, how: str, beside: float
) -> None:
    features, columns, _ = shape
    note = f"{seconds * 1e6:.1f} us, torch {beside * 1e6:.1f}{how and ', ' + how}"
    if rows in MANY:
        rate = 2 * rows * features * columns / seconds
        place.results.tell(what, rate / 1e12, "TFLOP/s", share=rate / place.matmul_rate(), of="matmul", note=note)
    else:
        rate = features * columns * 2 / seconds
        place.results.tell(what, rate / 1e9, "GB/s", share=rate / place.copy_rate(), of="copy rate", note=note)


# ---- the sampler ----------------------------------------------------------------------------------------------------


def peaked(place: Place, rows: int, vocab: int) -> Tensor:
    """Logits as a language model makes them: a few likely ids some 12 above the rest, whose spread is 2.5."""
    logits = torch.randn(rows, vocab, device=place.device) * 2.5
    likely = torch.randint(0, vocab, (rows, 40), device=place.device)
    return logits.scatter(1, likely, (18 - 0.25 * torch.arange(40.0, device=place.device)).expand(rows, -1))


def draw(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Callable[[], Tensor]:
    rows, device = len(logits), logits.device
    parameters = (
        torch.full((rows,), temperature or 1.0, device=device),
        torch.full((rows,), top_k, dtype=torch.int32, device=device),
        torch.full((rows,), top_p, device=device),
        torch.zeros(rows, device=device),
        torch.full((rows,), temperature == 0, device=device),
        torch.arange(rows, device=device) * 7919,
        torch.arange(rows, device=device),
    )
    return lambda: ops.sample(logits, *parameters)


CASES = {  # temperature, top_k, top_p
    "greedy": (0.0, 0, 1.0),
    "temperature": (0.8, 0, 1.0),
    "top-k 50": (0.8, 50, 1.0),
    "top-p 0.9": (0.8, 0, 0.9),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9),
}


def sampler(place: Place) -> None:
    """Microseconds, against reading every logit once from memory."""
    vocab = place.sized(VOCAB, 600)
    for rows in place.sized((1, 64, 256), (2,)):
        logits = peaked(place, rows, vocab)
        floor = logits.nbytes / place.copy_rate()
        for name, case in CASES.items():
            seconds, how = measure(place, [draw(logits, *case)], 0.05)
            place.results.tell(
                f"sample {rows} rows, {name}", seconds * 1e6, "us", share=seconds / floor, of="x reading logits",
                note=how,
            )  # fmt: skip
        argmax, _ = measure(place, [partial(torch.argmax, logits, -1)], 0.05)
        place.results.tell(
            f"torch.argmax {rows} rows", argmax * 1e6, "us", share=argmax / floor, of="x reading logits"
        )


if __name__ == "__main__":
    name = sys.argv[1]
    {"blocks": blocks, "linear": linear, "sampler": sampler}[name](open_place(name, __doc__, sys.argv[2:]))
