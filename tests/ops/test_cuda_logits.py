"""Penalties, biases, bans and masks on the device, and the counts they need, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.ops.kernels import LaunchedOps
from tests.ops.test_sampler import random_logits

VOCAB, ROWS, SLOTS = 1003, 5, 7
WORDS = -(-VOCAB // 32)


def history(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids of every slot [SLOTS, 200], and how many of them are prompt and how many there are."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (SLOTS, 200), generator=generator, dtype=torch.int32)
    ids[:, ::3] = 77  # repeated many times
    ids[:, 5] = VOCAB - 1
    return ids, torch.tensor([0, 1, 40, 200, 64, 100, 33]).int(), torch.tensor([0, 1, 200, 200, 65, 150, 200]).int()


def counted(launched: LaunchedOps, slots: Tensor) -> tuple[Tensor, Tensor]:
    """counts and prompt bits after load_counts; the slots that are not asked for stay as they were."""
    ids, num_prompt, num_tokens = history(1)
    counts = torch.full((SLOTS, VOCAB), 9, dtype=torch.int32)
    bits = torch.full((SLOTS, WORDS), -1, dtype=torch.int32)
    launched.launch(
        "load_counts", counts, bits, VOCAB, slots, ids, ids.stride(0), num_prompt[slots].contiguous(),
        num_tokens[slots].contiguous(), len(slots), changes=[counts, bits],
    )  # fmt: skip
    return counts, bits


def test_counts_of_a_history(launched: LaunchedOps) -> None:
    slots = torch.tensor([6, 0, 2, 3, 4])
    counts, bits = counted(launched, slots)
    ids, num_prompt, num_tokens = history(1)
    for slot in range(SLOTS):
        if slot not in slots.tolist():
            assert (counts[slot] == 9).all()
            assert (bits[slot] == -1).all()
            continue
        prompt, output = ids[slot, : num_prompt[slot]], ids[slot, num_prompt[slot] : num_tokens[slot]]
        assert torch.equal(counts[slot], torch.bincount(output, minlength=VOCAB).int())
        held = (bits[slot].view(-1, 1) >> torch.arange(32) & 1).flatten()[:VOCAB].bool()
        assert torch.equal(held.nonzero()[:, 0], prompt.unique().long())


def test_drawn_tokens_are_counted(launched: LaunchedOps) -> None:
    counts = torch.zeros(SLOTS, VOCAB, dtype=torch.int32)
    slots, ids = torch.tensor([3, 3, 0, 6]), torch.tensor([5, 5, VOCAB - 1, -1])
    launched.launch("count_tokens", counts, VOCAB, slots, ids, 4, changes=[counts])
    assert counts[3, 5] == 2
    assert counts[0, VOCAB - 1] == 1
    assert counts.sum() == 3


def penalised(
    logits: Tensor, ids: list[int], prompt: int, presence: float, frequency: float, repetition: float
) -> Tensor:
    """engine/sampling/logits.py, in numpy's float32."""
    row = logits.clone().numpy()
    if repetition != 1:
        seen = np.unique(np.array(ids, dtype=np.int64))
        row[seen] = np.where(row[seen] > 0, row[seen] / np.float32(repetition), row[seen] * np.float32(repetition))
    output, counts = np.unique(np.array(ids[prompt:], dtype=np.int64), return_counts=True)
    row[output] -= np.float32(presence) + np.float32(frequency) * counts.astype(np.float32)
    return torch.from_numpy(row)


@pytest.mark.parametrize("indirect", [True, False], ids=["slots", "own-rows"])
def test_penalties(launched: LaunchedOps, indirect: bool) -> None:
    slots = torch.tensor([6, 0, 2, 3, 5]) if indirect else torch.arange(ROWS)
    counts, bits = counted(launched, torch.arange(SLOTS))
    ids, num_prompt, num_tokens = history(1)
    wide = random_logits(ROWS, VOCAB + 9, seed=3)
    wide[:, 77] = -torch.inf  # a banned id stays banned
    logits = wide[:, :VOCAB]
    values = torch.tensor([[0.5, 0.25, 1.3], [0.0, 0.0, 1.0], [0.0, -1.5, 1.0], [2.0, 0.0, 0.7], [0.0, 0.1, 2.0]])
    want = torch.stack(
        [
            penalised(logits[i], ids[s, : num_tokens[s]].tolist(), int(num_prompt[s]), *values[i].tolist())
            for i, s in enumerate(slots.tolist())
        ]
    )
    beyond = wide[:, VOCAB:].clone()
    presence, frequency, repetition = (column.contiguous() for column in values.T)
    launched.launch(
        "apply_penalties", logits, ROWS, VOCAB, wide.stride(0), slots if indirect else None, counts, bits, presence,
        frequency, repetition, changes=[logits],
    )  # fmt: skip
    assert torch.equal(logits, want)
    assert torch.equal(wide[:, VOCAB:], beyond)


def test_biases_and_bans(launched: LaunchedOps) -> None:
    logits = random_logits(3, VOCAB, seed=4)
    want = logits.clone()
    rows, ids = torch.tensor([0, 2, 2, 1]), torch.tensor([5, VOCAB - 1, 5, 0])
    values = torch.tensor([1.5, -100.0, -torch.inf, 0.25])
    want[rows, ids] += values
    launched.launch("add_bias", logits, VOCAB, rows, ids, values, 4, changes=[logits])
    assert torch.equal(logits, want)


@pytest.mark.parametrize("words", [WORDS, WORDS - 2], ids=["whole", "short"])
def test_token_bitmask(launched: LaunchedOps, words: int) -> None:
    generator = torch.Generator().manual_seed(5)
    mask = torch.randint(-(2**31), 2**31, (2, words), generator=generator).int()
    rows = torch.tensor([1, -1, 0, 1])
    wide = random_logits(4, VOCAB + 5, seed=6)
    logits, want = wide[:, :VOCAB], wide[:, :VOCAB].clone()
    allowed = (mask.unsqueeze(-1) >> torch.arange(32) & 1).bool().flatten(1)[:, :VOCAB]
    allowed = torch.nn.functional.pad(allowed, (0, VOCAB - allowed.shape[1]))
    for row, mask_row in enumerate(rows.tolist()):
        if mask_row >= 0:
            want[row].masked_fill_(~allowed[mask_row], -torch.inf)
    launched.launch("apply_token_bitmask", logits, 4, VOCAB, wide.stride(0), mask, words, rows, changes=[logits])
    assert torch.equal(logits, want)
    assert wide[:, VOCAB:].isfinite().all()
