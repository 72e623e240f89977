"""The compiled sampler against the reference, id for id, and both against the distribution they claim to draw from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine import ops
from engine.sampling.philox import seed_key, uniform
from engine.sampling.reference import Draw, Edits, candidates, edited, exponential, weights
from engine.sampling.reference import sample as reference_sample

LEVELS = ops.isa_levels()


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    ops.set_isa(request.param)
    yield request.param
    ops.set_isa("auto")


def native(logits: Tensor, draws: Sequence[Draw], **parts: Any) -> list[int]:
    keys = np.array([d.seed_key for d in draws], dtype=np.uint64).view(np.int64)
    return ops.sample(
        logits,
        torch.tensor([d.temperature for d in draws], dtype=torch.float32),
        torch.tensor([d.top_k for d in draws], dtype=torch.int32),
        torch.tensor([d.top_p for d in draws], dtype=torch.float32),
        torch.tensor([d.min_p for d in draws], dtype=torch.float32),
        torch.tensor([d.greedy for d in draws], dtype=torch.bool),
        torch.from_numpy(keys),
        torch.tensor([d.position for d in draws], dtype=torch.int64),
        **parts,
    ).tolist()


def check_rows(logits: Tensor, draws: Sequence[Draw]) -> None:
    """Every level draws the reference's id."""
    want = [reference_sample(row, draw) for row, draw in zip(logits.numpy(), draws, strict=True)]
    for level in LEVELS:
        ops.set_isa(level)
        got = native(logits, draws)
        assert got == [-1 if w is None else w for w in want], level
    ops.set_isa("auto")


def random_logits(rows: int, vocab: int, seed: int, spread: float = 4.0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


# ---- against the reference ------------------------------------------------------------------------------------

plain_logits = st.floats(-30, 30, width=32)
odd_logits = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 1.0, -torch.inf, 3e38, -3e38, 1e-40]), st.floats(width=32, allow_nan=True)
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], Draw]:
    values = draw(st.sampled_from([plain_logits, st.integers(-3, 3).map(float), odd_logits]))
    logits = draw(st.lists(values, min_size=1, max_size=300))
    if draw(st.booleans()):
        logits = [logits[i % len(logits)] for i in range(draw(st.integers(1, 700)))]
    return np.array(logits, dtype=np.float32), Draw(
        temperature=draw(st.one_of(st.floats(0.0625, 4, width=32), st.sampled_from([1.0, 1e-30, 1e30]))),
        top_k=draw(st.one_of(st.just(0), st.integers(1, 20), st.integers(1, 800))),
        top_p=draw(st.one_of(st.just(1.0), st.floats(0, 1, width=32))),
        min_p=draw(st.one_of(st.just(0.0), st.floats(0, 1, width=32))),
        greedy=draw(st.sampled_from([False, False, False, True])),
        seed_key=draw(st.integers(0, 2**64 - 1)),
        position=draw(st.integers(0, 2**40)),
    )


@settings(max_examples=400, deadline=None)
@given(cases())
def test_any_row(case: tuple[npt.NDArray[np.float32], Draw]) -> None:
    logits, draw = case
    check_rows(torch.from_numpy(logits)[None], [draw])


SETTINGS = [
    Draw(),
    Draw(temperature=0.3),
    Draw(temperature=100.0),
    Draw(top_k=1),
    Draw(top_k=50),
    Draw(top_k=3000),
    Draw(top_p=0.9),
    Draw(top_p=0.5, temperature=2.0),
    Draw(top_p=0.9999),
    Draw(top_p=0.0),
    Draw(min_p=0.05),
    Draw(top_k=40, top_p=0.8, min_p=0.02, temperature=0.7),
    Draw(greedy=True),
]


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1.0, 6.0, 1e6], ids=lambda s: f"spread{s:g}")
def test_large_rows(spread: float) -> None:
    logits = random_logits(len(SETTINGS), 20_011, seed=5, spread=spread)
    draws = [
        Draw(d.temperature, d.top_k, d.top_p, d.min_p, d.greedy, seed_key(9, i, 0), i) for i, d in enumerate(SETTINGS)
    ]
    check_rows(logits, draws)


def test_peaked_rows_with_bans() -> None:
    logits = random_logits(13, 4_099, seed=6, spread=2.0)
    logits[:, 17] += 12
    logits[:, 100:4000] = -torch.inf
    draws = [
        Draw(d.temperature, d.top_k, d.top_p, d.min_p, d.greedy, seed_key(1, 0, i), 3) for i, d in enumerate(SETTINGS)
    ]
    check_rows(logits, draws)


# ---- the definition itself ------------------------------------------------------------------------------------


def test_exponential_is_accurate() -> None:
    d = np.linspace(-29.9, 0, 200_001).astype(np.float32)
    assert np.abs(exponential(d) / np.exp(d.astype(np.float64)) - 1).max() < 2e-7
    assert exponential(np.zeros(1, np.float32))[0] == 1


def test_weights_are_the_softmax() -> None:
    logits = random_logits(1, 30_000, seed=1)[0]
    weight, _ = weights(logits.numpy(), 0.8)
    got = torch.from_numpy(weight).double() / weight.sum()
    want = torch.softmax(logits.double() / 0.8, 0)
    assert (got - want).abs().sum() < 1e-6  # twice the distance between the two distributions


def test_filters_keep_what_they_say() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.1, 0.2, 0.2], dtype=np.float32))
    assert candidates(logits, Draw()) == [1, 3, 4, 0, 2]
    assert candidates(logits, Draw(top_k=2)) == [1, 3]  # of two equals the lower id
    assert candidates(logits, Draw(top_p=0.55)) == [1, 3]
    assert candidates(logits, Draw(top_p=0.65)) == [1, 3, 4]
    assert candidates(logits, Draw(top_p=0.0)) == [1]
    assert candidates(logits, Draw(min_p=0.49)) == [1, 3, 4]
    assert candidates(logits, Draw(top_k=3, top_p=0.7)) == [1, 3]  # of what top-k left: 0.6 / 0.8


def test_inverse_cdf_in_id_order() -> None:
    """Against plain float64: the cumulative probability that first exceeds u."""
    logits = random_logits(400, 50, seed=2, spread=1.0)
    draws = [Draw(temperature=0.9, seed_key=seed_key(3, 0, i), position=7) for i in range(400)]
    cumulative = torch.softmax(logits.double() / 0.9, -1).cumsum(-1)
    u = torch.tensor([uniform(d.seed_key, 7) for d in draws], dtype=torch.float64)
    want = (cumulative > u[:, None]).int().argmax(-1)
    near = (cumulative - u[:, None]).abs().amin(-1) < 1e-6  # where the weights' last bits may decide
    got = torch.tensor(native(logits, draws))
    assert near.sum() < 5
    assert torch.equal(got[~near], want[~near])


def test_drawn_ids_follow_the_distribution() -> None:
    """Chi-square over positions of one sequence and over the choices of one request (99 degrees of freedom)."""
    count, vocab = 40_000, 100
    logits = random_logits(1, vocab, seed=3, spread=1.0)
    expected = (torch.softmax(logits[0].double(), 0) * count).numpy()
    along = [Draw(seed_key=seed_key(11, 0, 0), position=p) for p in range(count)]
    across = [Draw(seed_key=seed_key(11, 0, c), position=5) for c in range(count)]
    for draws in (along, across):
        observed = np.bincount(native(logits.expand(count, -1), draws), minlength=vocab)
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        assert abs(chi_square - 99) < 4 * (2 * 99) ** 0.5


def test_choices_and_neighbouring_seeds_draw_independently() -> None:
    """A 8 x 8 contingency table of equally likely ids (63 degrees of freedom)."""
    count = 20_000
    flat = torch.zeros(1, 8).expand(count, -1)
    base = native(flat, [Draw(seed_key=seed_key(5, 0, 0), position=p) for p in range(count)])
    for other_key in (seed_key(5, 0, 1), seed_key(6, 0, 0), seed_key(5, 1, 0)):
        other = native(flat, [Draw(seed_key=other_key, position=p) for p in range(count)])
        table = np.bincount(np.array(base) * 8 + np.array(other), minlength=64)
        chi_square = float(((table - count / 64) ** 2 / (count / 64)).sum())
        assert abs(chi_square - 63) < 4 * (2 * 63) ** 0.5


# ---- rows on their own ----------------------------------------------------------------------------------------


def test_a_row_does_not_know_its_neighbours(level: str) -> None:
    logits = random_logits(64, 3_001, seed=4)
    draws = [
        Draw(d.temperature, d.top_k, d.top_p, d.min_p, d.greedy, seed_key(2, 0, i), i)
        for i, d in enumerate(SETTINGS[i % len(SETTINGS)] for i in range(64))
    ]
    whole = native(logits, draws)
    assert [native(logits[i : i + 1], [draws[i]])[0] for i in range(64)] == whole
    assert native(logits.flip(0), draws[::-1]) == whole[::-1]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert native(logits, draws) == whole
    finally:
        torch.set_num_threads(threads)


def test_bad_rows_are_flagged_alone(level: str) -> None:
    logits = random_logits(6, 1_000, seed=8)
    clean = native(logits, [Draw()] * 6)
    logits[1, 999] = torch.nan
    logits[2, 0] = torch.inf
    logits[3] = -torch.inf
    got = native(logits, [Draw(greedy=i == 1) for i in range(6)])
    assert got == [clean[0], -1, -1, -1, clean[4], clean[5]]


def test_strided_rows_and_no_rows(level: str) -> None:
    wide = random_logits(5, 300, seed=9)
    assert native(wide[:, :200], [Draw()] * 5) == native(wide[:, :200].contiguous(), [Draw()] * 5)
    assert native(wide[:0], []) == []


# ---- edits before the draw ------------------------------------------------------------------------------------


def packed(edits: Sequence[Edits], vocab: int) -> dict[str, Any]:
    """What `ops.sample` takes for these edits of its rows."""
    tokens = [(*e.prompt_ids, *e.output_ids) for e in edits]
    starts = torch.tensor([0, *np.cumsum([len(t) for t in tokens]).tolist()])
    bias_starts = torch.tensor([0, *np.cumsum([len(e.bias) for e in edits]).tolist()])
    words = np.zeros((len(edits), -(-vocab // 32)), dtype=np.uint32)
    for mask, edit in zip(words, edits, strict=True):
        for i in edit.allowed or ():
            mask[i // 32] |= np.uint32(1 << i % 32)
    return {
        "penalties": ops.Penalties(
            torch.tensor([[e.repetition, e.presence, e.frequency] for e in edits]),
            torch.tensor([i for t in tokens for i in t], dtype=torch.int32),
            starts,
            starts[:-1] + torch.tensor([len(e.prompt_ids) for e in edits]),
        ),
        "biases": ops.Biases(
            torch.tensor([i for e in edits for i, _ in e.bias], dtype=torch.int32),
            torch.tensor([b for e in edits for _, b in e.bias], dtype=torch.float32),
            bias_starts,
        ),
        "masks": ops.Masks(
            torch.from_numpy(words.view(np.int32)),
            torch.tensor([-1 if e.allowed is None else i for i, e in enumerate(edits)]),
        ),
    }


@st.composite
def edit_cases(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], list[Edits]]:
    vocab, rows = draw(st.sampled_from([1, 7, 31, 32, 33, 200])), draw(st.integers(1, 4))
    values = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 3.0, -np.inf])
    logits = draw(st.lists(st.lists(values, min_size=vocab, max_size=vocab), min_size=rows, max_size=rows))
    ids = st.integers(0, vocab - 1)
    some, number = st.lists(ids, max_size=12).map(tuple), st.floats(-2, 2, width=32)
    edit = st.builds(
        Edits,
        prompt_ids=some,
        output_ids=some,
        repetition=st.sampled_from([1.0, 1.25, 0.5, 3.0]),
        presence=number,
        frequency=number,
        bias=st.dictionaries(ids, st.one_of(number, st.just(-np.inf)), max_size=4).map(lambda d: tuple(d.items())),
        allowed=st.one_of(st.none(), st.frozensets(ids, max_size=8)),
    )
    return np.array(logits, dtype=np.float32), draw(st.lists(edit, min_size=rows, max_size=rows))


@settings(max_examples=300, deadline=None)
@given(edit_cases())
def test_edits_are_those_of_the_reference(case: tuple[npt.NDArray[np.float32], list[Edits]]) -> None:
    """Told and drawn from the edited row, on every level; the logits themselves stay."""
    logits, edits = case
    rows, vocab = logits.shape
    want = [edited(row, edit) for row, edit in zip(logits, edits, strict=True)]
    draws = [Draw(greedy=True)] * rows
    source = torch.from_numpy(logits)
    for level in LEVELS:
        ops.set_isa(level)
        drawn = ops.Drawn(torch.empty(rows, vocab), torch.arange(rows))
        got = native(source, draws, drawn=drawn, **packed(edits, vocab))
        assert got == [-1 if (w := reference_sample(row, Draw(greedy=True))) is None else w for row in want], level
        for told, row, token_id in zip(drawn.logits.numpy(), want, got, strict=True):
            assert token_id < 0 or np.array_equal(told, row), level
    ops.set_isa("auto")
    assert np.array_equal(source.numpy(), logits)


def test_edited_rows_draw_as_the_reference_does_whoever_stands_beside_them(level: str) -> None:
    rng = np.random.default_rng(3)
    logits = random_logits(30, 3_001, seed=12)
    edits = [
        Edits(
            prompt_ids=tuple(rng.integers(0, 3_001, 400).tolist()),
            output_ids=tuple(rng.integers(0, 50, 60).tolist()),
            repetition=1.3 if i % 2 else 1.0,
            presence=0.5,
            frequency=0.25 * (i % 3),
            bias=((i, 4.0), (2_999, -np.inf)),
            allowed=None if i % 3 else frozenset(rng.integers(0, 3_001, 1_500).tolist()),
        )
        for i in range(30)
    ]
    draws = [Draw(0.9, 0, 0.95, 0.0, i % 5 == 0, seed_key(2, 0, i), i) for i in range(30)]
    want = [reference_sample(edited(row, e), d) for row, e, d in zip(logits.numpy(), edits, draws, strict=True)]
    parts = packed(edits, 3_001)
    assert native(logits, draws, **parts) == want
    for i in range(0, 30, 7):
        assert native(logits[i : i + 1], [draws[i]], **packed([edits[i]], 3_001)) == [want[i]]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert native(logits, draws, **parts) == want
    finally:
        torch.set_num_threads(threads)


def test_a_row_with_ids_outside_the_vocabulary_is_flagged_alone(level: str) -> None:
    logits = random_logits(4, 100, seed=13)
    edits = [Edits(bias=((100, 1.0),)), Edits(), Edits(output_ids=(3, -1)), Edits(output_ids=(3, 4), presence=9.0)]
    got = native(logits, [Draw(greedy=True)] * 4, **packed(edits, 128))
    want = reference_sample(edited(logits[3].numpy(), edits[3]), Draw(greedy=True))
    assert got == [-2, int(logits[1].argmax()), -2, want]


def test_parameters_of_rows_may_stand_anywhere_in_longer_tensors(level: str) -> None:
    logits = random_logits(4, 300, seed=17)
    draws = [
        Draw(temperature=0.5 + i / 3, top_k=i % 3 * 20, top_p=1 - i / 20, min_p=i / 100, greedy=i == 5, seed_key=i)
        for i in range(9)
    ]
    rows, positions = [7, 2, 5, 2], torch.tensor([3, 1, 4, 5])
    table = [torch.tensor([getattr(d, name) for d in draws]) for name in ("temperature", "top_k", "top_p", "min_p")]
    table[1] = table[1].int()
    table += [torch.tensor([d.greedy for d in draws]), torch.tensor([d.seed_key for d in draws])]
    got = ops.sample(logits, *table, positions, rows=rows)
    want = ops.sample(logits, *[column[rows] for column in table], positions)
    assert got.tolist() == want.tolist()
    source = torch.tensor([2, 0, 0, 3])
    got = ops.sample(logits, *table, positions, rows=rows, source=source)
    assert got.tolist() == ops.sample(logits[source], *[column[rows] for column in table], positions).tolist()


def test_rows_are_taken_from_where_source_says(level: str) -> None:
    logits = random_logits(3, 500, seed=14)
    draws = [Draw(seed_key=seed_key(8, 0, i)) for i in range(5)]
    source = torch.tensor([2, 0, 0, 1, 2])
    assert native(logits, draws, source=source) == native(logits[source], draws)
    assert native(logits, draws[:1], source=source[:1]) == native(logits[2:], draws[:1])


# ---- log probabilities ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 7, 128, 49_152])
def test_logprobs(vocab: int, kernels: Any) -> None:
    logits = random_logits(9, vocab, seed=10)
    ids = torch.randint(0, vocab, (9, 3), generator=torch.Generator().manual_seed(1))
    got = kernels.logprobs_of(logits, ids)
    want = torch.log_softmax(logits.double(), -1).gather(1, ids)
    torch.testing.assert_close(got.double(), want, rtol=2e-7, atol=2e-7)
    alone = torch.cat([kernels.logprobs_of(logits[i : i + 1], ids[i : i + 1, :1]) for i in range(9)])
    assert torch.equal(got[:, :1], alone)


def test_logprobs_of_odd_rows(kernels: Any) -> None:
    logits = torch.zeros(3, 200)
    logits[0, 5] = -torch.inf
    logits[1, 5] = torch.nan
    got = kernels.logprobs_of(logits, torch.tensor([[5], [0], [0]]))[:, 0]
    assert got[0] == -torch.inf
    assert got[1].isnan()
    assert got[2].item() == pytest.approx(-np.log(200))


def ranked(row: npt.NDArray[np.float32], count: int) -> list[int]:
    order = np.lexsort((np.arange(len(row)), -row))[:count]
    return [int(i) for i in order if row[i] > -np.inf]


@pytest.mark.parametrize("kind", ["plain", "ties", "banned"])
@pytest.mark.parametrize("vocab", [5, 128, 3_001])
def test_the_most_likely_ids(vocab: int, kind: str, kernels: Any) -> None:
    logits = random_logits(6, vocab, seed=15)
    if kind == "ties":
        logits = logits.round()
    elif kind == "banned":
        logits[:, 2:] = -torch.inf
    ids = torch.randint(0, vocab, (6, 2), generator=torch.Generator().manual_seed(2))
    for num_top in (0, 1, 20, 1_000):
        told = kernels.logprobs_topn(logits, ids, num_top, ranks=True)
        assert torch.equal(told.logprobs, kernels.logprobs_of(logits, ids))
        assert told.ranks.tolist() == [int((row > row[i]).sum()) + 1 for row, i in zip(logits, ids[:, 0], strict=True)]
        assert told.top_ids.shape == told.top_logprobs.shape == (6, min(num_top, vocab))
        for r, row in enumerate(logits):
            want = ranked(row.numpy(), num_top)
            assert told.top_ids[r, : len(want)].tolist() == want
            assert torch.equal(
                told.top_logprobs[r, : len(want)],
                kernels.logprobs_of(row[None], torch.tensor([want], dtype=torch.int64))[0],
            )
            assert bool((told.top_logprobs[r, len(want) :] == -torch.inf).all())


def test_the_most_likely_ids_of_rows_that_source_names_and_of_odd_ones(kernels: Any) -> None:
    logits = random_logits(4, 300, seed=16)
    logits[1, 7] = torch.nan
    logits[2, 7] = torch.inf
    source = torch.tensor([3, 3, 0, 1, 2])
    told = kernels.logprobs_topn(logits, torch.empty((5, 0), dtype=torch.int64), 3, source=source)
    assert told.logprobs.shape == (5, 0)
    assert torch.equal(told.top_ids[0], told.top_ids[1])
    assert told.top_ids[2].tolist() == ranked(logits[0].numpy(), 3)
    assert bool(told.top_logprobs[3:].isnan().all())
    assert bool(told.top_logprobs[:3].isfinite().all())


# ---- arguments ------------------------------------------------------------------------------------------------


NO_IDS = torch.empty(0, dtype=torch.int32)


def call(**changes: Any) -> Callable[[], Tensor]:
    arguments: dict[str, Any] = {
        "logits": torch.zeros(2, 10),
        "temperature": torch.ones(2),
        "top_k": torch.zeros(2, dtype=torch.int32),
        "top_p": torch.ones(2),
        "min_p": torch.zeros(2),
        "greedy": torch.zeros(2, dtype=torch.bool),
        "seed_keys": torch.zeros(2, dtype=torch.int64),
        "positions": torch.zeros(2, dtype=torch.int64),
    }
    return lambda: ops.sample(**{**arguments, **changes})


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (call(logits=torch.zeros(10)), r"sample: logits: wanted \[rows, vocab\]"),
        (call(logits=torch.zeros(2, 0)), "sample: logits: wanted 1 to"),
        (call(logits=torch.zeros(2, 10).bfloat16()), "sample: logits: wanted float32, got bfloat16"),
        (call(temperature=torch.ones(3)), r"sample: temperature: wanted \[rows\] = \[2\], got \[3\]"),
        (call(temperature=torch.tensor([1.0, 0.0])), "sample: temperature: wanted a positive number .* in row 1"),
        (call(temperature=torch.tensor([1.0, torch.nan])), "sample: temperature: wanted a positive number"),
        (call(temperature=torch.tensor([torch.inf, 1.0])), "sample: temperature: wanted a positive number"),
        (call(top_k=torch.zeros(2, dtype=torch.int64)), "sample: top_k: wanted int32, got int64"),
        (call(top_p=torch.tensor([1.0, 1.1])), "sample: top_p: wanted a number between 0 and 1"),
        (call(min_p=torch.tensor([-0.1, 1.0])), "sample: min_p: wanted a number between 0 and 1"),
        (call(greedy=torch.zeros(2)), "sample: greedy: wanted uint8, got float32"),
        (call(positions=torch.zeros(4, dtype=torch.int64)[::2]), "sample: positions: wanted a contiguous tensor"),
        (
            lambda: ops.logprobs_of(torch.zeros(2, 4), torch.tensor([[0], [4]])),
            "logprobs_of: ids: wanted ids from 0 to 3",
        ),
        (lambda: ops.logprobs_of(torch.zeros(2, 4), torch.tensor([[0], [-1]])), "logprobs_of: ids: wanted ids from 0"),
        (
            lambda: ops.logprobs_topn(torch.zeros(2, 4), torch.zeros((2, 0)).long(), -1),
            "topn: num_top: wanted a number",
        ),
        (
            lambda: ops.logprobs_topn(torch.zeros(2, 4), torch.zeros((2, 0)).long(), 1, ranks=True),
            "topn: ids: wanted at least one id",
        ),
        (call(source=torch.tensor([0, 2])), "sample_edited: source: wanted numbers from 0 to 1, got 2 at 1"),
        (call(rows=[0, 2]), "sample_edited: rows: wanted numbers from 0 to 1, got 2 at 1"),
        (call(rows=[0, -1]), "sample_edited: rows: wanted numbers from 0 to 1, got -1 at 1"),
        (call(rows=[0, 1, 1]), "sample_edited: rows: wanted 2 numbers, got 3"),
        (call(rows=[1, 0], temperature=torch.tensor([0.0, 1.0])), "temperature: wanted a positive number .* in row 1"),
        (
            call(penalties=ops.Penalties(torch.zeros(2, 3), NO_IDS, torch.zeros(3).long(), torch.zeros(2).long())),
            "penalties: wanted a positive repetition penalty, got 0 in row 0",
        ),
        (
            call(penalties=ops.Penalties(torch.ones(2, 3), NO_IDS, torch.tensor([0, 1, 1]), torch.zeros(2).long())),
            "token_starts: wanted ascending offsets up to 0, got 1 at 1",
        ),
        (
            call(penalties=ops.Penalties(torch.ones(2, 3), NO_IDS, torch.zeros(3).long(), torch.tensor([0, 1]))),
            "output_starts: wanted an offset among the row's tokens, got 1 in row 1",
        ),
        (
            call(biases=ops.Biases(NO_IDS, torch.zeros(1), torch.zeros(3).long())),
            r"bias_values: wanted \[biases\] = \[0\], got \[1\]",
        ),
        (
            call(masks=ops.Masks(torch.zeros((1, 1), dtype=torch.int32), torch.tensor([0, 1]))),
            "mask_of: wanted numbers from -1 to 0, got 1 at 1",
        ),
        (call(masks=(torch.zeros((1, 1), dtype=torch.int32), None)), "mask_of: wanted a tensor beside the others"),
        (call(drawn=ops.Drawn(torch.zeros(1, 9), torch.zeros(2).long())), r"drawn: wanted \[., vocab\] = \[\*, 10\]"),
    ],
)
def test_wrong_arguments_are_named(run: Callable[[], object], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run()


def test_greedy_ignores_the_other_parameters(level: str) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, -1.0]])
    assert native(logits, [Draw(temperature=0.0, greedy=True)]) == [1]
