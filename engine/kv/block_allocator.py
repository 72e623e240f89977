"""Blocks of KV memory: who holds each, what it contains, which one is reused next.

Knows ids, reference counts and content names; knows no sequences. Guarantees:
- allocate, share and release are O(1); the least recently released block is reused first;
- a released block keeps its content name until it is reused, so it can be matched again;
- blocks without a name are reused before any named one is evicted;
- a hit compares tokens and parent, not only the name.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import islice

MAX_PARTIAL_CANDIDATES = 32  # children compared for a partial match; bounds the work per admission


class OutOfBlocks(Exception):
    """The pool has no free block."""


class Block:
    """`block_size` token slots. While free it hangs in the allocator's queue by `previous` and `next`."""

    __slots__ = ("block_id", "group", "name", "next", "num_filled", "parent", "previous", "ref_count", "token_ids")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.num_filled = 0  # slots whose K/V is written (or is being written by a step in flight)
        self.group = 0
        self.name: bytes | None = None  # set: the block is full, its content frozen and findable
        self.parent: bytes = b""
        self.token_ids: tuple[int, ...] = ()
        self.previous: Block = self
        self.next: Block = self


class BlockAllocator:
    """num_blocks equal blocks of block_size slots, shared by num_groups KV groups."""

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.block_size = block_size
        self.blocks = tuple(Block(i) for i in range(num_blocks))
        self.num_free = 0
        self.num_shared = 0  # blocks with ref_count >= 2
        self.live_slots = 0  # written slots in used blocks
        self.evictions = 0
        self._by_name: tuple[dict[bytes, Block], ...] = tuple({} for _ in range(num_groups))
        # (parent name, first token) -> children in order of commit
        self._children: tuple[dict[tuple[bytes, int], dict[int, Block]], ...] = tuple({} for _ in range(num_groups))
        self._queue = Block(len(self.blocks))  # ring: queue.next is reused first
        for block in self.blocks:
            self._enqueue(block, before=self._queue)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_used(self) -> int:
        return len(self.blocks) - self.num_free

    @property
    def num_cached(self) -> int:
        return sum(map(len, self._by_name))

    def allocate(self, group: int = 0, exclude: Container[int] = ()) -> Block:
        """The block that was released longest ago, emptied, with ref_count 1.

        exclude: ids that must not be handed out. Raises OutOfBlocks when no other is free."""
        block = self._queue.next
        while block is not self._queue and block.block_id in exclude:
            block = block.next
        if block is self._queue:
            raise OutOfBlocks
        self._dequeue(block)
        if block.name is not None:
            self._forget(block)
            self.evictions += 1
        block.group = group
        block.ref_count = 1
        block.num_filled = 0
        return block

    def share(self, block: Block) -> None:
        """One more holder; takes the block out of the free queue if it had none."""
        if block.ref_count == 0:
            self._dequeue(block)
            self.live_slots += block.num_filled
        elif block.ref_count == 1:
            self.num_shared += 1
        block.ref_count += 1

    def release(self, block: Block) -> None:
        """One holder less. Without holders the block is free: to the back of the queue if its content can be
        found again, else to the front."""
        if block.ref_count == 2:
            self.num_shared -= 1
        block.ref_count -= 1
        if block.ref_count == 0:
            self.live_slots -= block.num_filled
            self._enqueue(block, before=self._queue if block.name is not None else self._queue.next)

    def fill(self, block: Block, num_filled: int) -> None:
        """The first `num_filled` slots of a used block are written."""
        self.live_slots += num_filled - block.num_filled
        block.num_filled = num_filled

    def commit(self, block: Block, name: bytes, parent: bytes, token_ids: tuple[int, ...]) -> bool:
        """Freeze a full used block under `name`. False if another block already carries it; this one then
        stays nameless."""
        index = self._by_name[block.group]
        if name in index:
            return False
        index[name] = block
        block.name, block.parent, block.token_ids = name, parent, token_ids
        self._children[block.group].setdefault((parent, token_ids[0]), {})[block.block_id] = block
        return True

    def find(self, group: int, name: bytes, parent: bytes, token_ids: Sequence[int]) -> Block | None:
        """The block named `name`, used or free, if it really holds these tokens after that parent."""
        block = self._by_name[group].get(name)
        if block is None or block.parent != parent or block.token_ids != tuple(token_ids):
            return None
        return block

    def find_partial(self, group: int, parent: bytes, token_ids: Sequence[int]) -> tuple[Block, int] | None:
        """The child of `parent` that starts with most of `token_ids`, and how many; None without one.

        Looks at the most recently committed children only (MAX_PARTIAL_CANDIDATES)."""
        if not token_ids:
            return None
        best: Block | None = None
        best_len = 0
        candidates = self._children[group].get((parent, token_ids[0]))
        for block in islice(reversed(candidates.values()), MAX_PARTIAL_CANDIDATES) if candidates else ():
            length = _common_prefix(block.token_ids, token_ids)
            if length > best_len:
                best, best_len = block, length
        return (best, best_len) if best is not None else None

    def forget_free(self) -> None:
        """Free blocks lose their names: nothing will match them again. O(num_blocks)."""
        for block in self.blocks:
            if block.ref_count == 0 and block.name is not None:
                self._forget(block)

    def check(self) -> None:
        """Raises AssertionError if an invariant of a block's life is broken. O(num_blocks); for tests."""
        queued = []
        block = self._queue.next
        while block is not self._queue:
            assert block.next.previous is block
            queued.append(block.block_id)
            block = block.next
        free = {b.block_id for b in self.blocks if b.ref_count == 0}
        assert len(queued) == len(set(queued)) == self.num_free, "free queue and its length disagree"
        assert set(queued) == free, "ref_count 0 must mean: in the free queue"
        assert all(b.ref_count >= 0 for b in self.blocks)
        assert self.num_used + self.num_free == self.num_blocks
        assert self.num_shared == sum(b.ref_count >= 2 for b in self.blocks)
        assert self.live_slots == sum(b.num_filled for b in self.blocks if b.ref_count)
        for group, index in enumerate(self._by_name):
            named = {b.block_id: b for b in self.blocks if b.name is not None and b.group == group}
            assert {b.block_id for b in index.values()} == set(named), "one block per name, each name in the index"
            for name, block in index.items():
                assert block.name == name
                assert block.num_filled == self.block_size == len(block.token_ids), "only full blocks are named"
                assert block.block_id in self._children[group][block.parent, block.token_ids[0]]
            assert sum(map(len, self._children[group].values())) == len(index)
            assert all(self._children[group].values()), "no empty lists of children are kept"

    def _forget(self, block: Block) -> None:
        assert block.name is not None
        del self._by_name[block.group][block.name]
        key = (block.parent, block.token_ids[0])
        siblings = self._children[block.group][key]
        del siblings[block.block_id]
        if not siblings:
            del self._children[block.group][key]
        block.name, block.parent, block.token_ids = None, b"", ()

    def _enqueue(self, block: Block, before: Block) -> None:
        previous = before.previous
        block.previous, block.next = previous, before
        previous.next = before.previous = block
        self.num_free += 1

    def _dequeue(self, block: Block) -> None:
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = block
        self.num_free -= 1


def _common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    return length
