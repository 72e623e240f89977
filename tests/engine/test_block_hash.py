from __future__ import annotations

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from engine.kv.block_hash import DIGEST_BYTES, BlockHasher

KEY = b"a fixed key"


def test_same_key_gives_the_same_names_and_another_key_others() -> None:
    first, again, other = BlockHasher(KEY), BlockHasher(KEY), BlockHasher(b"another key")
    root = first.root(cache_salt="tenant")
    assert root == again.root(cache_salt="tenant") != other.root(cache_salt="tenant")
    assert first.block(root, [1, 2, 3]) == again.block(root, [1, 2, 3]) != other.block(root, [1, 2, 3])
    assert len(first.block(root, [1, 2, 3])) == len(root) == DIGEST_BYTES


def test_every_process_draws_its_own_key() -> None:
    assert BlockHasher().root() != BlockHasher().root()


def test_extra_keys_do_not_read_as_each_other() -> None:
    hasher = BlockHasher(KEY)
    tricky = "a" + "adapter=" + (1).to_bytes(8, "little").decode() + "b"
    roots = [
        hasher.root(),
        hasher.root(cache_salt="a"),
        hasher.root(adapter="a"),
        hasher.root(cache_salt="a", adapter="b"),
        hasher.root(cache_salt="b", adapter="a"),
        hasher.root(cache_salt="ab"),
        hasher.root(cache_salt=tricky),
        hasher.root(cache_salt="\ud800"),  # a lone surrogate is a legal JSON string
    ]
    assert all(a != b for a, b in combinations(roots, 2))


def test_root_and_block_names_live_apart() -> None:
    hasher = BlockHasher(KEY)
    assert hasher.root() not in (hasher.block(b"", []), hasher.block(hasher.root(), []))


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_name_depends_on_every_token_and_its_place(blocks: list[list[int]]) -> None:
    hasher = BlockHasher(KEY)

    def chain(content: list[list[int]]) -> bytes:
        name = hasher.root()
        for tokens in content:
            name = hasher.block(name, tokens)
        return name

    original = chain(blocks)
    assert chain([list(tokens) for tokens in blocks]) == original
    for index, tokens in enumerate(blocks):
        for place in range(len(tokens)):
            changed = [list(t) for t in blocks]
            changed[index][place] ^= 1
            assert chain(changed) != original
