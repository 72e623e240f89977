"""Which blocks a sequence needs, which it may share, and when it must copy.

Knows sequences and blocks; knows no queues and no budget. Collects what changes in a step (`NewBlocks`, block
copies) until `take_deltas`. Guarantees:
- a sequence writes only blocks that are its own and carry no name: shared ones are copied first;
- copies of one step can run in any order or at once: no block is both source and destination, none twice a
  destination. A source may be reused by the same step for new tokens, since copies run before the forward;
- at least one token of every sequence is computed, however much of it is cached.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from engine.batch import NewBlocks
from engine.kv.block_allocator import Block, BlockAllocator, OutOfBlocks
from engine.kv.block_hash import BlockHasher
from engine.sequence import Sequence
from engine.stats import CacheStats


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """What the cache holds of a sequence's start, valid in every KV group. Nothing is reserved by it.

    blocks: per group, the full blocks. partial: per group, a block whose first num_partial tokens come next.
    next_name: of the first full block that is missing and could have been shared; None without one."""

    blocks: tuple[tuple[Block, ...], ...]
    partial: tuple[Block, ...] = ()
    num_partial: int = 0
    next_name: bytes | None = None


class KVCacheManager:
    """num_groups: KV groups (layers with one lifetime rule), each with a table per sequence over one pool."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        num_groups: int = 1,
        hasher: BlockHasher | None = None,
    ) -> None:
        self.allocator = BlockAllocator(num_blocks, block_size, num_groups)
        self.block_size = block_size
        self.num_groups = num_groups
        self.enable_prefix_caching = enable_prefix_caching
        self._hasher = hasher or BlockHasher()
        self._claims: Counter[bytes] = Counter()  # names of blocks that running sequences are computing
        self._new_blocks: list[NewBlocks] = []
        self._copies: list[tuple[int, int]] = []
        self._sources: set[int] = set()
        self._num_copies = self._num_copy_on_write = 0
        self._prefix_queries = self._prefix_hits = 0
        self._live_slot_steps = self._used_slot_steps = 0
        self._min_utilization = 1.0

    @property
    def num_free_blocks(self) -> int:
        return self.allocator.num_free

    # -- admission

    def match_prefix(self, sequence: Sequence) -> PrefixMatch:
        """The longest cached start of the sequence's known tokens, as far as it may be reused."""
        groups = range(self.num_groups)
        if not self.enable_prefix_caching:
            return PrefixMatch(tuple(() for _ in groups))
        size, tokens, limit = self.block_size, sequence.token_ids, sequence.num_reusable_tokens
        parent = self._root_name(sequence)
        next_name: bytes | None = None
        columns: list[list[Block]] = []
        for index in range(limit // size):
            self._extend_names(sequence, index + 1)  # only as far as needed: most waiting prompts stop early
            next_name = sequence.block_names[index]
            content = tokens[index * size : (index + 1) * size]
            found = [self.allocator.find(group, next_name, parent, content) for group in groups]
            hits = [block for block in found if block is not None]
            if len(hits) < self.num_groups:
                break
            columns.append(hits)
            parent, next_name = next_name, None
        start = len(columns) * size
        partial, num_partial = self._match_partial(parent, tokens[start : min(start + size, limit)])
        return PrefixMatch(
            blocks=tuple(tuple(column[group] for column in columns) for group in groups),
            partial=partial,
            num_partial=num_partial,
            next_name=next_name,
        )

    def is_claimed(self, name: bytes | None) -> bool:
        """True while a running sequence is computing the block of that name."""
        return name is not None and name in self._claims

    def num_blocks_to_admit(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Free blocks that computing all known tokens of the sequence takes, given the match."""
        whole = -(-len(sequence.token_ids) // self.block_size)
        return sum(whole - sum(block.ref_count > 0 for block in blocks) for blocks in match.blocks)

    def begin(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Give a waiting sequence its tables, start them with the match, announce the blocks it will compute.

        Returns the number of tokens it need not compute; they count as computed."""
        for blocks in match.blocks:
            for block in blocks:
                self.allocator.share(block)
        sequence.block_tables = tuple([block.block_id for block in blocks] for blocks in match.blocks)
        num_full = len(match.blocks[0])
        sequence.num_committed_blocks = num_full
        sequence.num_computed_tokens = num_full * self.block_size
        if match.num_partial and self._copy_partial(sequence, match):
            sequence.num_computed_tokens += match.num_partial
        if self.enable_prefix_caching:
            sequence.num_claimed_blocks = len(sequence.token_ids) // self.block_size
            self._extend_names(sequence, sequence.num_claimed_blocks)
            for name in sequence.block_names[num_full : sequence.num_claimed_blocks]:
                self._claims[name] += 1
        return sequence.num_computed_tokens

    def count_prefix_query(self, num_tokens: int, num_hits: int) -> None:
        """A request's prompt was looked up for the first time."""
        self._prefix_queries += num_tokens
        self._prefix_hits += num_hits

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed so far is found by sequences that come from now on: they have other names. What
        runs keeps its blocks. Names that waiting sequences know must be forgotten with it."""
        self._hasher = BlockHasher()
        self.allocator.forget_free()

    # -- growth

    def allocate_slots(self, sequence: Sequence, num_tokens: int, *, announce: bool = True) -> bool:
        """Slots for the next `num_tokens` tokens of a running sequence; shared blocks among them are copied.

        announce: tell the runner in NewBlocks (False when a NewRow will carry the tables).
        False, and nothing changed, when the pool has too few blocks."""
        start, end, size = sequence.position, sequence.position + num_tokens, self.block_size
        first, offset = divmod(start, size)
        blocks = self.allocator.blocks
        if num_tokens == 1 and offset and self._fill_own(sequence, offset + 1):
            return True
        num_needed, copies = 0, False
        for table in sequence.block_tables:
            num_needed += -(-end // size) - len(table)
            if offset and blocks[table[first]].ref_count > 1:
                num_needed, copies = num_needed + 1, True
        if num_needed:
            available = self.allocator.num_free
            if copies:  # a copy must not land on a source of another copy
                available -= sum(blocks[source].ref_count == 0 for source in self._sources)
            if num_needed > available:
                return False
            for group in range(self.num_groups):
                self._grow(sequence, group, first, offset, -(-end // size), announce)
        for table in sequence.block_tables:
            for index in range(first, len(table)):
                self.allocator.fill(blocks[table[index]], min(size, end - index * size))
        return True

    def _fill_own(self, sequence: Sequence, num_filled: int) -> bool:
        """Fill the last block of every group as far as that, if these are the sequence's alone."""
        blocks = self.allocator.blocks
        for table in sequence.block_tables:
            if blocks[table[-1]].ref_count != 1:
                return False
        for table in sequence.block_tables:
            self.allocator.fill(blocks[table[-1]], num_filled)
        return True

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int | None = None) -> None:
        """The child shares every block of the parent, or those of its first num_tokens tokens, which must be full."""
        num_blocks = None if num_tokens is None else num_tokens // self.block_size
        child.block_tables = tuple(table[:num_blocks] for table in parent.block_tables)
        for table in child.block_tables:
            for block_id in table:
                self.allocator.share(self.allocator.blocks[block_id])
        child.root_name = parent.root_name
        child.block_names = parent.block_names[:num_blocks]
        child.num_committed_blocks = min(parent.num_committed_blocks, len(child.block_tables[0]))

    # -- after the step

    def commit(self, sequence: Sequence) -> None:
        """Name the blocks that the retired steps have filled, so that others can share them."""
        size, first = self.block_size, sequence.num_committed_blocks
        num_full = sequence.num_computed_tokens // size
        if num_full <= first:
            return
        sequence.num_committed_blocks = num_full
        if not self.enable_prefix_caching:
            return
        self._extend_names(sequence, num_full)
        names, blocks = sequence.block_names, self.allocator.blocks
        parent = names[first - 1] if first else self._root_name(sequence)
        for index in range(first, num_full):
            content = tuple(sequence.token_ids[index * size : (index + 1) * size])
            for table in sequence.block_tables:
                block = blocks[table[index]]
                if block.name is None:  # a forked sibling may have named it already
                    self.allocator.commit(block, names[index], parent, content)
            if index < sequence.num_claimed_blocks:
                self._drop_claim(names[index])
            parent = names[index]

    def free(self, sequence: Sequence) -> None:
        """Give all blocks back, the last ones first, so that beginnings stay cached longest."""
        for name in sequence.block_names[sequence.num_committed_blocks : sequence.num_claimed_blocks]:
            self._drop_claim(name)  # it will not compute them: whoever waits for them may start
        sequence.num_claimed_blocks = 0
        for table in sequence.block_tables:
            for block_id in reversed(table):
                self.allocator.release(self.allocator.blocks[block_id])
        sequence.block_tables = ()
        sequence.forget_computed()

    # -- what a step tells

    def take_deltas(self) -> tuple[tuple[NewBlocks, ...], tuple[tuple[int, int], ...]]:
        """Table changes and block copies since the last call; the step that is being built carries them."""
        new_blocks, copies = tuple(self._new_blocks), tuple(self._copies)
        self._new_blocks.clear()
        self._copies.clear()
        self._sources.clear()
        return new_blocks, copies

    def record_step(self) -> None:
        """Add this step to the live-slot utilisation. Called once per step, when its slots are allocated."""
        live, used = self.allocator.live_slots, self.allocator.num_used * self.block_size
        self._live_slot_steps += live
        self._used_slot_steps += used
        if used:
            self._min_utilization = min(self._min_utilization, live / used)

    def stats(self) -> CacheStats:
        allocator = self.allocator
        return CacheStats(
            num_blocks=allocator.num_blocks,
            num_used_blocks=allocator.num_used,
            num_cached_blocks=allocator.num_cached,
            num_shared_blocks=allocator.num_shared,
            live_slots=allocator.live_slots,
            block_copies_total=self._num_copies,
            copy_on_write_total=self._num_copy_on_write,
            evictions_total=allocator.evictions,
            prefix_queries_total=self._prefix_queries,
            prefix_hits_total=self._prefix_hits,
            live_slot_steps_total=self._live_slot_steps,
            used_slot_steps_total=self._used_slot_steps,
            min_utilization=self._min_utilization,
        )

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raises AssertionError unless the tables of `sequences` (all that hold blocks) explain every reference
        and every written slot. For tests."""
        self.allocator.check()
        holders: Counter[int] = Counter()
        filled: dict[int, int] = {}
        claims: Counter[bytes] = Counter()
        for sequence in sequences:
            claims.update(sequence.block_names[sequence.num_committed_blocks : sequence.num_claimed_blocks])
            for table in sequence.block_tables:
                assert len(table) == -(-sequence.position // self.block_size), "blocks only for scheduled tokens"
                holders.update(table)
                for index, block_id in enumerate(table):
                    slots = min(self.block_size, sequence.position - index * self.block_size)
                    filled[block_id] = max(filled.get(block_id, 0), slots)
        assert claims == self._claims, "every claim belongs to a sequence"
        for block in self.allocator.blocks:
            assert block.ref_count == holders[block.block_id], f"block {block.block_id}: references and holders differ"
            assert not block.ref_count or block.num_filled == filled[block.block_id], "written slots are counted"

    def _root_name(self, sequence: Sequence) -> bytes:
        if sequence.root_name is None:
            request = sequence.request
            sequence.root_name = self._hasher.root(cache_salt=request.cache_salt, adapter=request.adapter)
        return sequence.root_name

    def _extend_names(self, sequence: Sequence, num_blocks: int) -> None:
        names, size = sequence.block_names, self.block_size
        parent = names[-1] if names else self._root_name(sequence)
        for index in range(len(names), num_blocks):
            parent = self._hasher.block(parent, sequence.token_ids[index * size : (index + 1) * size])
            names.append(parent)

    def _match_partial(self, parent: bytes, tokens: list[int]) -> tuple[tuple[Block, ...], int]:
        found = [self.allocator.find_partial(group, parent, tokens) for group in range(self.num_groups)]
        hits = [hit for hit in found if hit is not None]
        if len(hits) < self.num_groups:
            return (), 0
        return tuple(block for block, _ in hits), min(length for _, length in hits)

    def _copy_partial(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Fresh blocks that start as copies of the partly matching ones; False if there is no room for that
        beside the sources (the tokens are computed instead)."""
        sources = self._sources.union(block.block_id for block in match.partial)
        fresh: list[Block] = []
        try:
            for group in range(self.num_groups):
                fresh.append(self.allocator.allocate(group, exclude=sources))
        except OutOfBlocks:
            for block in fresh:
                self.allocator.release(block)
            return False
        for table, source, block in zip(sequence.block_tables, match.partial, fresh, strict=True):
            table.append(block.block_id)
            self.allocator.fill(block, match.num_partial)
            self._copy(source, block)
        return True

    def _grow(self, sequence: Sequence, group: int, first: int, offset: int, num_blocks: int, announce: bool) -> None:
        table = sequence.block_tables[group]
        changed = len(table)
        if offset:
            written = self.allocator.blocks[table[first]]
            if written.ref_count > 1:
                fresh = self.allocator.allocate(group, exclude=self._sources | {written.block_id})
                self._copy(written, fresh)
                self._num_copy_on_write += 1
                self.allocator.release(written)
                table[first] = fresh.block_id
                changed = first
        while len(table) < num_blocks:
            table.append(self.allocator.allocate(group).block_id)
        if announce and changed < len(table):
            assert sequence.row is not None
            self._new_blocks.append(NewBlocks(sequence.row, group, changed, tuple(table[changed:])))

    def _copy(self, source: Block, destination: Block) -> None:
        self._copies.append((source.block_id, destination.block_id))
        self._sources.add(source.block_id)
        self._num_copies += 1

    def _drop_claim(self, name: bytes) -> None:
        self._claims[name] -= 1
        if not self._claims[name]:
            del self._claims[name]
