"""Perplexity of a text under a served model: what quantisation costs, told beside bfloat16.

    python -m tests.perplexity [--model MODEL] [--quantization none auto int8 int4]

The text (tests/data/passage.txt, about 2,000 tokens) was written for this purpose, so no model has seen it. It goes
through the paged cache in chunks of 256 tokens.
"""

from __future__ import annotations

import argparse
from math import exp
from pathlib import Path

import torch

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig
from engine.models.backbone import Backbone
from engine.models.loader import LoadedModel, load_model
from engine.models.self_check import BLOCK_SIZE, PagedRun

PASSAGE = Path(__file__).parent / "data" / "passage.txt"
CHUNK = 256


def loss(backbone: Backbone, ids: list[int]) -> float:
    """Mean negative log-likelihood of ids[1:], in nats per token."""
    run = PagedRun(backbone, num_blocks=len(ids) // BLOCK_SIZE + 2)
    total = torch.zeros((), dtype=torch.float64)
    for start in range(0, len(ids) - 1, CHUNK):
        piece = ids[start : min(start + CHUNK, len(ids) - 1)]
        logprobs = run.step([(0, piece)])[0].double().log_softmax(-1)
        targets = torch.tensor(ids[start + 1 : start + 1 + len(piece)])
        total -= logprobs.gather(1, targets[:, None]).sum()
    run.close()
    return float(total) / (len(ids) - 1)


def passage_of(model: LoadedModel) -> list[int]:
    return model.tokenizer.encode(PASSAGE.read_text("utf-8"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", nargs="+", default=["none", "auto", "int8", "int4"])
    arguments = parser.parse_args()
    for choice in arguments.quantization:
        config = ModelConfig(model=arguments.model, dtype=arguments.dtype, quantization=choice)
        model = load_model(config, DeviceConfig(), backend=NativeAttention())
        ids, backbone = passage_of(model), model.backbone
        nats = loss(backbone, ids)
        served = f"{choice} ({backbone.quantization})"
        print(
            f"{served:20s} {len(ids)} tokens, loss {nats:.4f}, perplexity {exp(nats):.3f}, "
            f"weights {backbone.weight_bytes / 2**20:.1f} MiB, loaded in {sum(model.load_seconds.values()):.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
