"""bfloat16 parity: our logits stray from float32 transformers no further than transformers' own bfloat16 logits do.

Per prompt, teacher-forced over what float32 transformers writes itself. Top-1 agreement is counted over all prompts: a
single one's is a matter of one or two near ties. Ours go the way of a served request: the prompt in one
step, then a token per step, over the paged cache; transformers' come from one forward over all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig
from engine.models.loader import LoadedModel, load_model
from engine.models.self_check import PagedRun
from tests.engine.test_generate_equality import TEXTS, reference_model
from tests.models import MODELS, model_file

NUM_NEW = 64
MOST = 1.1  # times transformers' own error
PROMPTS = (
    *TEXTS,
    "The quick brown fox jumps over the lazy dog. The dog",
    "SELECT name, COUNT(*) FROM orders WHERE",
    "Ingredients: 200 g flour, 2 eggs, 100 ml milk.\nMethod:",
    "Q: What is the boiling point of nitrogen?\nA:",
    '{"name": "Ada", "born": 1815, "known_for": [',
    "Il était une fois, dans un petit village,",
    "Theorem. There are infinitely many primes.\nProof.",
    "The meeting was moved to Thursday because",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self",
    "To be, or not to be, that is the",
    "My favourite colour is blue, and my favourite animal is",
)


@dataclass(frozen=True, slots=True)
class Errors:
    """Of [NUM_NEW, vocab] logits against float32's. agreeing: rows with float32's most likely token."""

    maximum: float
    squares: float  # mean
    agreeing: int


def errors(logits: Tensor, exact: Tensor) -> Errors:
    difference = (logits - exact).double()
    return Errors(
        float(difference.abs().max()),
        float(difference.square().mean()),
        int((logits.argmax(1) == exact.argmax(1)).sum()),
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """Per prompt."""

    ours: list[Errors]
    theirs: list[Errors]

    def ratios(self) -> tuple[float, float]:
        """(maximum, root mean square) over all prompts, ours by theirs."""
        maximum = max(e.maximum for e in self.ours) / max(e.maximum for e in self.theirs)
        squares = sum(e.squares for e in self.ours) / sum(e.squares for e in self.theirs)
        return maximum, squares**0.5

    def table(self) -> str:
        lines = [
            f"{o.maximum:.4f}/{t.maximum:.4f}={o.maximum / t.maximum:.3f} "
            f"rms {o.squares**0.5:.5f}/{t.squares**0.5:.5f}={(o.squares / t.squares) ** 0.5:.3f} "
            f"top-1 {o.agreeing}/{t.agreeing} of {NUM_NEW}"
            for o, t in zip(self.ours, self.theirs, strict=True)
        ]
        agreeing = [sum(e.agreeing for e in side) for side in (self.ours, self.theirs)]
        return "\n".join([*lines, f"all: maximum, rms {self.ratios()}, top-1 {agreeing}"])


@torch.inference_mode()
def written_by(model: Any, prompt: list[int]) -> list[int]:
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_NEW,
        do_sample=False,
        repetition_penalty=1.0,
    )
    return [int(token) for token in out[0]]


@torch.inference_mode()
def in_one_forward(model: Any, ids: list[int]) -> Tensor:
    """Logits [NUM_NEW, vocab] of the last tokens, float32."""
    logits: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False, logits_to_keep=NUM_NEW).logits[0]
    return logits.float()


def as_served(loaded: LoadedModel, ids: list[int]) -> Tensor:
    """Logits [NUM_NEW, vocab] of the last tokens, float32."""
    run = PagedRun(loaded.backbone)
    prompt_len = len(ids) - NUM_NEW + 1
    rows = [run.step([(0, ids[:prompt_len])])[0][-1:]]
    rows += [run.step([(0, [token])])[0] for token in ids[prompt_len:]]
    run.close()
    return torch.cat(rows)


def measure(path: Path) -> Measured:
    loaded = load_model(ModelConfig(model=str(path), dtype="bfloat16"), DeviceConfig(), backend=NativeAttention())
    exact, rounded = (reference_model(path, dtype) for dtype in (torch.float32, torch.bfloat16))
    measured = Measured([], [])
    for text in PROMPTS:
        ids = written_by(exact, loaded.tokenizer.encode(text))[:-1]
        wanted = in_one_forward(exact, ids)
        measured.ours.append(errors(as_served(loaded, ids), wanted))
        measured.theirs.append(errors(in_one_forward(rounded, ids), wanted))
    return measured


@pytest.fixture(scope="module", params=sorted(MODELS))
def measured(request: pytest.FixtureRequest) -> Measured:
    result = measure(model_file(request.param))
    print(f"\n{request.param}\n{result.table()}")
    return result


@pytest.mark.slow
@pytest.mark.model
def test_logits_are_no_further_from_float32_than_transformers_own(measured: Measured) -> None:
    assert len(measured.ours) == 20
    for ours, theirs in zip(measured.ours, measured.theirs, strict=True):
        assert ours.maximum <= MOST * theirs.maximum
        assert ours.squares <= MOST**2 * theirs.squares


@pytest.mark.slow
@pytest.mark.model
def test_the_most_likely_token_is_as_often_float32s(measured: Measured) -> None:
    assert sum(e.agreeing for e in measured.ours) >= sum(e.agreeing for e in measured.theirs)
