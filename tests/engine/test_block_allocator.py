from __future__ import annotations

import random

import pytest

from engine.kv.block_allocator import MAX_PARTIAL_CANDIDATES, Block, BlockAllocator, OutOfBlocks

ROOT = b"root"


def take_named(allocator: BlockAllocator, name: bytes, tokens: tuple[int, ...], parent: bytes = ROOT) -> Block:
    block = allocator.allocate()
    allocator.fill(block, allocator.block_size)
    assert allocator.commit(block, name, parent, tokens)
    return block


def test_hands_out_every_block_once_and_then_refuses() -> None:
    allocator = BlockAllocator(3, 4)
    ids = {allocator.allocate().block_id for _ in range(3)}
    assert ids == {0, 1, 2}
    with pytest.raises(OutOfBlocks):
        allocator.allocate()
    allocator.check()


def test_excluded_blocks_are_passed_over() -> None:
    allocator = BlockAllocator(3, 4)
    assert allocator.allocate(exclude={0, 1}).block_id == 2
    with pytest.raises(OutOfBlocks):
        allocator.allocate(exclude={0, 1})
    allocator.check()
    assert allocator.num_free == 2


def test_released_content_stays_findable_until_the_block_is_reused() -> None:
    allocator = BlockAllocator(2, 4)
    block = take_named(allocator, b"a", (1, 2, 3, 4))
    allocator.release(block)
    assert allocator.find(0, b"a", ROOT, [1, 2, 3, 4]) is block
    assert allocator.allocate() is not block, "a block without a name goes first"
    assert allocator.allocate() is block
    assert allocator.find(0, b"a", ROOT, [1, 2, 3, 4]) is None
    assert allocator.evictions == 1
    allocator.check()


def test_least_recently_released_is_evicted_first() -> None:
    allocator = BlockAllocator(3, 1)
    blocks = [take_named(allocator, bytes([i]), (i,)) for i in range(3)]
    for index in (1, 2, 0):
        allocator.release(blocks[index])
    allocator.share(blocks[1])
    allocator.release(blocks[1])
    assert [allocator.allocate() for _ in range(3)] == [blocks[2], blocks[0], blocks[1]]


def test_a_hit_needs_equal_tokens_and_parent_not_only_the_name() -> None:
    allocator = BlockAllocator(1, 2)
    take_named(allocator, b"same name", (1, 2))
    assert allocator.find(0, b"same name", ROOT, [1, 3]) is None
    assert allocator.find(0, b"same name", b"other", [1, 2]) is None
    assert allocator.find(0, b"same name", ROOT, [1, 2]) is not None


def test_one_block_per_name() -> None:
    allocator = BlockAllocator(2, 2)
    take_named(allocator, b"a", (1, 2))
    second = allocator.allocate()
    allocator.fill(second, 2)
    assert not allocator.commit(second, b"a", ROOT, (1, 2))
    assert second.name is None
    allocator.check()


def test_partial_match_takes_the_longest_common_start() -> None:
    allocator = BlockAllocator(4, 4)
    take_named(allocator, b"a", (1, 2, 9, 9))
    best = take_named(allocator, b"b", (1, 2, 3, 9))
    take_named(allocator, b"c", (1, 2, 3, 4), parent=b"elsewhere")
    take_named(allocator, b"d", (1, 9, 9, 9))
    assert allocator.find_partial(0, ROOT, [1, 2, 3, 4]) == (best, 3)
    assert allocator.find_partial(0, ROOT, [2, 2, 3]) is None
    assert allocator.find_partial(0, ROOT, []) is None


def test_partial_match_looks_at_a_bounded_number_of_candidates() -> None:
    allocator = BlockAllocator(MAX_PARTIAL_CANDIDATES + 1, 2)
    take_named(allocator, b"the only good one", (1, 2))
    for i in range(MAX_PARTIAL_CANDIDATES):
        take_named(allocator, b"%d" % i, (1, 100 + i))
    found = allocator.find_partial(0, ROOT, [1, 2])
    assert found is not None
    assert found[1] == 1, "older candidates are not searched"


def test_counts_of_shared_blocks_and_live_slots() -> None:
    allocator = BlockAllocator(2, 4)
    block = allocator.allocate()
    allocator.fill(block, 3)
    allocator.share(block)
    assert (allocator.num_shared, allocator.live_slots, allocator.num_used) == (1, 3, 1)
    allocator.release(block)
    assert (allocator.num_shared, allocator.live_slots) == (0, 3)
    allocator.release(block)
    assert (allocator.live_slots, allocator.num_used) == (0, 0)
    assert allocator.allocate() is block, "its content cannot be found again, so it is reused first"
    assert allocator.live_slots == 0, "a new holder starts with nothing written"


@pytest.mark.parametrize("damage", ["reference", "queue", "name", "filled", "shared"])
def test_check_notices(damage: str) -> None:
    allocator = BlockAllocator(4, 2)
    block = take_named(allocator, b"a", (1, 2))
    allocator.allocate()
    allocator.check()
    match damage:
        case "reference":
            block.ref_count = 0
        case "queue":
            allocator.num_free += 1
        case "name":
            block.name = b"b"
        case "filled":
            block.num_filled = 1
        case "shared":
            block.ref_count = 2
    with pytest.raises(AssertionError):
        allocator.check()


def test_no_block_is_lost_in_100_000_operations() -> None:
    rng = random.Random(20261129)
    allocator = BlockAllocator(61, 4)
    held: list[Block] = []
    named = 0
    for operation in range(100_000):
        match rng.randrange(5):
            case 0 | 1:
                if allocator.num_free:
                    held.append(allocator.allocate())
                    allocator.fill(held[-1], rng.randrange(5))
            case 2 | 3:
                if held:
                    allocator.release(held.pop(rng.randrange(len(held))))
            case _:
                block = rng.choice(held) if held and rng.random() < 0.7 else rng.choice(allocator.blocks)
                if block.ref_count and block.name is None:
                    allocator.fill(block, 4)
                    tokens = tuple(rng.randrange(3) for _ in range(4))
                    named += allocator.commit(block, bytes(tokens), ROOT, tokens)
                elif block.ref_count or block.name is not None:
                    allocator.share(block)
                    held.append(block)
        if operation % 100 == 0:
            allocator.check()
        assert allocator.num_used == len({b.block_id for b in held})
    assert named > 1000
    assert allocator.evictions > 1000
    for block in held:
        allocator.release(block)
    allocator.check()
    assert allocator.num_free == 61
