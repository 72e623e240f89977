"""The CUDA sampler and its neighbours on the case lists of the CPU's, id for id against the definition."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from engine.sampling.philox import philox4x32, seed_key
from engine.sampling.reference import Draw
from engine.sampling.reference import sample as reference_sample
from tests.ops.kernels import EMULATED, LaunchedOps, kernels_of
from tests.ops.test_sampler import SETTINGS, cases, random_logits


def drawn(launched: LaunchedOps, logits: Tensor, draws: Sequence[Draw], source: Tensor | None = None) -> list[int]:
    keys = np.array([d.seed_key for d in draws], dtype=np.uint64).view(np.int64)
    return launched.sample(
        logits,
        torch.tensor([d.temperature for d in draws], dtype=torch.float32),
        torch.tensor([d.top_k for d in draws], dtype=torch.int32),
        torch.tensor([d.top_p for d in draws], dtype=torch.float32),
        torch.tensor([d.min_p for d in draws], dtype=torch.float32),
        torch.tensor([d.greedy for d in draws], dtype=torch.bool),
        torch.from_numpy(keys),
        torch.tensor([d.position for d in draws], dtype=torch.int64),
        source=source,
    ).tolist()


def check_rows(launched: LaunchedOps, logits: Tensor, draws: Sequence[Draw]) -> None:
    want = [reference_sample(row, draw) for row, draw in zip(logits.numpy(), draws, strict=True)]
    assert drawn(launched, logits, draws) == [-1 if w is None else w for w in want]


def draws_of(seed: int) -> list[Draw]:
    return [replace(draw, seed_key=seed_key(seed, i, 0), position=i) for i, draw in enumerate(SETTINGS)]


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


@pytest.mark.parametrize("name", [EMULATED[0], pytest.param("cuda", marks=ON_GPU)])
def test_any_row(name: str) -> None:
    seeds = count()

    @settings(max_examples=150, deadline=None)
    @given(cases())
    def check(case: tuple[npt.NDArray[np.float32], Draw]) -> None:
        logits, draw = case
        with kernels_of(name if name == "cuda" else EMULATED[next(seeds) % 3]) as launched:
            check_rows(launched, torch.from_numpy(logits)[None], [draw])

    check()


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 6.0, 1e6], ids=lambda s: f"spread{s:g}")
def test_large_rows(launched: LaunchedOps, spread: float) -> None:
    check_rows(launched, random_logits(len(SETTINGS), 20_011, seed=5, spread=spread), draws_of(9))


def test_peaked_rows_with_bans(launched: LaunchedOps) -> None:
    logits = random_logits(len(SETTINGS), 4_099, seed=6, spread=2.0)
    logits[:, 17] += 12
    logits[:, 100:4000] = -torch.inf
    check_rows(launched, logits, draws_of(1))


@pytest.mark.parametrize(("vocab", "width"), [(1, 1), (31, 40), (32, 33), (1024, 1030), (40_000, 40_001)])
def test_rows_of_every_length(launched: LaunchedOps, vocab: int, width: int) -> None:
    """At a stride, so that rows start at every alignment."""
    logits = random_logits(len(SETTINGS), width, seed=vocab)[:, :vocab]
    check_rows(launched, logits, draws_of(3))


def test_a_draw_at_every_place(launched: LaunchedOps) -> None:
    """Few ids, many positions: each boundary of the running sum is met from both sides."""
    logits = random_logits(1, 70, seed=2, spread=1.0).expand(200, -1)
    draws = [Draw(top_k=60, top_p=0.97, temperature=0.9, seed_key=seed_key(4, 0, 0), position=p) for p in range(200)]
    check_rows(launched, logits, draws)


def test_a_row_does_not_know_its_neighbours(launched: LaunchedOps) -> None:
    logits, draws = random_logits(len(SETTINGS), 3_001, seed=4), draws_of(2)
    whole = drawn(launched, logits, draws)
    assert [drawn(launched, logits[i : i + 1], [draws[i]])[0] for i in range(len(draws))] == whole
    assert drawn(launched, logits.flip(0), draws[::-1]) == whole[::-1]


def test_rows_that_share_logits(launched: LaunchedOps) -> None:
    logits, draws = random_logits(3, 1_001, seed=7), draws_of(5)
    source = torch.arange(len(draws)).flip(0) % 3
    assert drawn(launched, logits, draws, source=source) == drawn(launched, logits[source], draws)


def test_bad_rows_are_flagged_alone(launched: LaunchedOps) -> None:
    logits = random_logits(6, 1_000, seed=8)
    clean = drawn(launched, logits, [Draw()] * 6)
    logits[1, 999] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    got = drawn(launched, logits, [Draw(greedy=i == 1) for i in range(6)])
    assert got == [clean[0], -1, -1, -1, clean[4], clean[5]]


def test_philox_words(launched: LaunchedOps) -> None:
    ones = 0xFFFFFFFF
    inputs = [((0, 0, 0, 0), (0, 0)), ((ones,) * 4, (ones, ones))]
    inputs += [((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))]
    inputs += [((i * 7919, i, 3 * i, 0), (i << 20, ones - i)) for i in range(40)]
    counters, keys = (torch.tensor([x[part] for x in inputs]).to(torch.int32) for part in (0, 1))
    out = torch.zeros(len(inputs), 4, dtype=torch.int32)
    totals = [(2**62 - 1) >> (i % 40) for i in range(len(inputs))]
    places = torch.zeros(len(inputs), dtype=torch.int64)
    launched.launch("philox", counters, keys, torch.tensor(totals), out, places, len(inputs), changes=[out, places])
    want = [philox4x32(*pair) for pair in inputs]
    assert want[0] == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert torch.equal(out, torch.tensor(want).to(torch.int32))
    bits = [(words[0] << 32 | words[1]) >> 11 for words in want]
    assert places.tolist() == [b * total >> 53 for b, total in zip(bits, totals, strict=True)]


# ---- log probabilities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("vocab", "wanted"), [(1, 1), (50, 20), (5_000, 1), (5_000, 20), (5_000, 1024)])
@pytest.mark.parametrize("step", [0.0, 0.5], ids=["distinct", "ties"])
def test_most_likely_ids(launched: LaunchedOps, vocab: int, wanted: int, step: float) -> None:
    logits = random_logits(4, vocab, seed=11)
    if step:
        logits = (logits / step).round() * step
    logits[1, vocab // 2 :] = -torch.inf
    told = launched.logprobs_topn(logits, torch.zeros((4, 0), dtype=torch.int64), wanted)
    exact = torch.log_softmax(logits.double(), -1)
    for row in range(4):
        ranking = np.lexsort((np.arange(vocab), -logits[row].numpy()))
        ranking = ranking[logits[row].numpy()[ranking] > -np.inf][:wanted].tolist()
        missing = wanted - len(ranking)
        assert told.top_ids[row].tolist() == ranking + [0] * missing
        logprobs = told.top_logprobs[row]
        torch.testing.assert_close(logprobs[: len(ranking)].double(), exact[row, ranking], rtol=1e-7, atol=1e-7)
        missing_logprobs = logprobs[len(ranking) :]
        assert bool((missing_logprobs == -torch.inf).all() if ranking else missing_logprobs.isnan().all())
