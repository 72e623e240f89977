"""The random numbers of a sequence: a pure function of its seed key and the position of the token drawn.

Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3; SC 2011). There is no state,
so nothing has to be restored after preemption, and the compiled samplers compute the same numbers in any order.
docs/randomness.md has the definition with test vectors. Imports no torch: storey 1 derives the keys.
"""

from __future__ import annotations

import hashlib

_MASK = 0xFFFFFFFF
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_ROUNDS = 10

Words = tuple[int, int, int, int]


def seed_key(seed: int, prompt_index: int, choice_index: int) -> int:
    """The uint64 that keys one sequence's randomness.

    seed: int64. prompt_index, choice_index: uint32, the sequence's place in its request.
    Raises OverflowError for a value outside these ranges.
    """
    data = seed.to_bytes(8, "little", signed=True)
    data += prompt_index.to_bytes(4, "little") + choice_index.to_bytes(4, "little")
    digest = hashlib.blake2b(data, digest_size=8, person=b"pagemill-seed").digest()
    return int.from_bytes(digest, "little")


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds on four 32-bit counter words under two 32-bit key words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK,
        )
        k0, k1 = (k0 + _WEYL_0) & _MASK, (k1 + _WEYL_1) & _MASK
    return c0, c1, c2, c3


def random_bits(key: int, position: int) -> int:
    """53 random bits for the token at `position` (both uint64)."""
    words = philox4x32((position & _MASK, position >> 32 & _MASK, 0, 0), (key & _MASK, key >> 32 & _MASK))
    return (words[0] << 32 | words[1]) >> 11


def uniform(key: int, position: int) -> float:
    """The uniform number in [0, 1) for the token at `position`: random_bits x 2^-53, exact."""
    return random_bits(key, position) * 2.0**-53
