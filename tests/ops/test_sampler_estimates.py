"""The draw where the compiled sampler goes by estimates: many places of one row, above all those next to the border
between two ids, and nuclei whose end is next to the mass that top-p asks for. There the estimate must give way."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from engine import ops
from engine.sampling.philox import random_bits, seed_key
from engine.sampling.reference import Draw, candidates, weights
from tests.ops.test_sampler import native

LEVELS = ops.isa_levels()
KEY = seed_key(21, 0, 0)

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]


def philox_uniforms(key: int, count: int) -> Float64s:
    """uniform(key, position) of positions 0 to count - 1."""
    low = np.uint64(0xFFFFFFFF)
    word = np.uint64(32)
    c0, c1, c2, c3 = np.arange(count, dtype=np.uint64), *np.zeros((3, count), dtype=np.uint64)
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = second >> word ^ c1 ^ np.uint64(k0), second & low
        c2, c3 = first >> word ^ c3 ^ np.uint64(k1), first & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return ((c0 << word | c1) >> np.uint64(11)) * 2.0**-53


def rows() -> dict[str, Float32s]:
    """Single rows [vocab] of many kinds."""
    rng = np.random.default_rng(17)
    normal = rng.standard_normal(20_011)
    peaked = 2.5 * rng.standard_normal(20_011)
    peaked[rng.integers(0, 20_011, 40)] = 18 - 0.25 * np.arange(40)
    banned = peaked.copy()
    banned[rng.random(20_011) < 0.9] = -np.inf
    two = np.where(rng.random(9_000) < 0.5, 0.0, -12.0)
    last = np.full(5_000, -np.inf)
    last[-1] = 3.0
    made = {
        "flat": normal,
        "peaked": peaked,
        "banned": banned,
        "ties": np.round(2 * normal) / 2,
        "equal": np.zeros(3_000),
        "two levels": two,
        "tail": np.where(np.arange(20_011) == 7_777, 0.0, -27.9 - 0.3 * rng.random(20_011)),
        "offset": 3_000 + normal,
        "offset below": peaked - 70_000,
        "huge": 1e30 * normal,
        "one only": last,
        "one block": rng.standard_normal(77),
        "descending": -np.arange(2_000) / 64,
    }
    return {name: row.astype(np.float32) for name, row in made.items()}


ROWS = rows()
DRAWS = {
    "temperature 1": Draw(),
    "temperature 0.8": Draw(temperature=0.8),
    "temperature 0.05": Draw(temperature=0.05),
    "hardly a temperature": Draw(temperature=0.00097),
    "temperature 900": Draw(temperature=900.0),
    "top-p 0.9": Draw(temperature=0.8, top_p=0.9),
    "top-p 0.95": Draw(top_p=0.95),
    "top-p 0.3": Draw(temperature=0.7, top_p=0.3),
    "top-p 0.9999": Draw(temperature=0.7, top_p=0.9999),
    "min-p 0.05": Draw(temperature=0.8, min_p=0.05),
    "min-p 1e-10": Draw(temperature=0.8, min_p=1e-10),
    "top-p 0.9, min-p 0.01": Draw(temperature=0.9, top_p=0.9, min_p=0.01),
}


def on_every_level(row: Float32s, draws: list[Draw], want: list[int]) -> None:
    logits = torch.from_numpy(row).expand(len(draws), -1)
    for level in LEVELS:
        ops.set_isa(level)
        got = native(logits, draws)
        ops.set_isa("auto")
        assert got == want, level


def test_the_vectorised_numbers_are_those_of_the_page() -> None:
    assert [int(u * 2**53) for u in philox_uniforms(KEY, 50)] == [random_bits(KEY, p) for p in range(50)]


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_places_all_over_the_row_and_next_to_borders(row: Float32s, draw: Draw) -> None:
    kept = sorted(candidates(row, draw))
    weight, _ = weights(row, draw.temperature)
    running = [int(w) for w in np.cumsum(weight[kept])]
    share = np.array(running, dtype=np.float64) / running[-1]
    u = philox_uniforms(KEY, 4_000)
    at = np.searchsorted(share, u)
    to_border = np.minimum(np.abs(share[np.minimum(at, len(kept) - 1)] - u), np.abs(share[np.maximum(at - 1, 0)] - u))
    positions = [*range(60), *np.argsort(to_border)[:40].tolist()]
    want = [kept[bisect_right(running, random_bits(KEY, p) * running[-1] >> 53)] for p in positions]
    on_every_level(row, [replace(draw, seed_key=KEY, position=p) for p in positions], want)


def test_places_as_near_to_borders_as_float64_can_tell() -> None:
    """Of two ids, the second's logit is such that the border lies within a few millionths of the place drawn."""
    u = philox_uniforms(KEY, 4_000)
    for position in np.flatnonzero((u > 0.5) & (u < 0.99))[:12].tolist():
        border = np.float32(np.log((1 - u[position]) / u[position]))
        for _ in range(3):
            border = np.nextafter(border, np.float32(-np.inf))
        for _ in range(7):
            row = np.full(1_000, -np.inf, dtype=np.float32)
            row[100], row[900] = 0.0, border
            weight, _ = weights(row, 1.0)
            place = random_bits(KEY, position) * int(weight.sum()) >> 53
            on_every_level(row, [Draw(seed_key=KEY, position=position)], [100 if place < int(weight[100]) else 900])
            border = np.nextafter(border, np.float32(np.inf))


def kept_by(row: Float32s, draws: list[Draw]) -> Tensor:
    """[draws, vocab]: which ids each was drawn from."""
    drawn = ops.Drawn(torch.empty(len(draws), len(row)), torch.arange(len(draws)))
    native(torch.from_numpy(row).expand(len(draws), -1), draws, drawn=drawn)
    return drawn.logits > -torch.inf


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("name", ["flat", "peaked", "banned", "ties", "two levels", "tail", "offset", "descending"])
def test_nuclei_that_end_where_top_p_asks_for(name: str, temperature: float) -> None:
    """top_p is the mass of a prefix of the ranking as nearly as float32 can tell it, or a little more or less."""
    row = ROWS[name]
    weight, _ = weights(row, temperature)
    ranking = candidates(row, Draw())
    mass = np.cumsum(weight[ranking]).astype(np.float64)
    draws = []
    for rank in (0, 1, 2, 5, 11, 23, 50, 130, 400, 1_500):
        if rank < len(ranking):
            exact = np.float32(mass[rank] / mass[-1])
            near = [np.nextafter(exact, np.float32(0)), exact, np.nextafter(exact, np.float32(1))]
            draws += [Draw(temperature, top_p=float(p), seed_key=KEY, position=rank) for p in near if 0 < p < 1]
    want = torch.zeros(len(draws), len(row), dtype=torch.bool)
    for told, draw in zip(want, draws, strict=True):
        told[candidates(row, draw)] = True
    for level in LEVELS:
        ops.set_isa(level)
        got = kept_by(row, draws)
        ops.set_isa("auto")
        assert torch.equal(got, want), level
