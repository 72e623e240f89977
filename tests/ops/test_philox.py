"""The generator against the paper's known answers and the shape of its output; keys against fixed vectors."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest

from engine.sampling.philox import Words, philox4x32, random_bits, seed_key, uniform

ONES = 0xFFFFFFFF


# Random123's kat_vectors, "philox4x32 10"
@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(counter: Words, key: tuple[int, int], answer: Words) -> None:
    assert philox4x32(counter, key) == answer


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ((0, 0, 0), 14617832837595885884),
        ((-1, 2, 3), 4192970297361121073),
    ],
)
def test_seed_keys_stay(arguments: tuple[int, int, int], key: int) -> None:
    assert seed_key(*arguments) == key


def test_uniform_is_the_documented_number() -> None:
    assert uniform(seed_key(0, 0, 0), 0) == 0.8523279237531516
    assert random_bits(0, 0) == 0x6627E8D5E169C58D >> 11
    assert uniform(0, 0) == random_bits(0, 0) / 2**53
    assert random_bits(2**64 - 1, 2**63) < 2**53


def test_every_argument_changes_the_key() -> None:
    keys = {seed_key(s, p, c) for s in (-(2**63), -1, 0, 1, 2**63 - 1) for p in (0, 1, 2**32 - 1) for c in (0, 1, 7)}
    assert len(keys) == 45


@pytest.mark.parametrize("arguments", [(2**63, 0, 0), (0, -1, 0), (0, 0, 2**32)])
def test_out_of_range(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(OverflowError):
        seed_key(*arguments)


def independence(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> float:
    """Chi-square of a 16 x 16 table of pairs, in standard deviations from its mean (255 degrees of freedom)."""
    cells = (first * 16).astype(int) * 16 + (second * 16).astype(int)
    expected = len(first) / 256
    chi_square = float(((np.bincount(cells, minlength=256) - expected) ** 2 / expected).sum())
    return (chi_square - 255) / (2 * 255) ** 0.5


def draws(seed: int, prompt: int, choice: int, count: int = 20_000) -> npt.NDArray[np.float64]:
    key = seed_key(seed, prompt, choice)
    return np.array([uniform(key, position) for position in range(count)])


def test_neighbours_look_independent() -> None:
    """Consecutive positions, choices, prompts and seeds. The draws are fixed, so the bound cannot flicker."""
    base = draws(1234, 0, 0)
    assert abs(base.mean() - 0.5) < 4 / (12 * len(base)) ** 0.5
    assert abs(independence(base[:-1], base[1:])) < 4
    for other in (draws(1235, 0, 0), draws(1234, 1, 0), draws(1234, 0, 1)):
        assert abs(independence(base, other)) < 4


def test_first_tokens_of_many_sequences_are_uniform() -> None:
    """Across seeds and choices at one position, where a weak key schedule would show."""
    for keys in ([seed_key(s, 0, 0) for s in range(20_000)], [seed_key(0, 0, c) for c in range(20_000)]):
        u = np.array([uniform(key, 17) for key in keys])
        assert abs(independence(u[:-1], u[1:])) < 4


def test_imports_no_torch() -> None:
    code = "import sys, engine.sampling.philox; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
