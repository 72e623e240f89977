from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.kv.manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.sequence import Request, Sequence

SIZE = 4
TAILS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


def make_sequence(tokens: list[int], salt: str = "", n: int = 1) -> Sequence:
    sequence = Request(0, 0, tokens, SamplingParams(n=n), seed=0, cache_salt=salt).sequences[0]
    sequence.max_output_tokens = 10_000
    return sequence


def admit(manager: KVCacheManager, sequence: Sequence) -> int:
    """Match, begin and compute all known tokens; returns the number of cached ones."""
    cached = manager.begin(sequence, manager.match_prefix(sequence))
    sequence.row = 0
    compute(manager, sequence, sequence.num_uncomputed_tokens, announce=False)
    return cached


def compute(manager: KVCacheManager, sequence: Sequence, num_tokens: int, announce: bool = True) -> None:
    assert manager.allocate_slots(sequence, num_tokens, announce=announce)
    sampled = sequence.schedule(num_tokens)
    sequence.retire(sequence.position, sampled)
    manager.commit(sequence)


def generate(manager: KVCacheManager, sequence: Sequence, token: int) -> None:
    sequence.append(token)
    compute(manager, sequence, 1)


def test_blocks_are_allocated_only_for_scheduled_tokens() -> None:
    manager = KVCacheManager(8, SIZE)
    sequence = make_sequence(list(range(10)))
    manager.begin(sequence, manager.match_prefix(sequence))
    assert manager.allocate_slots(sequence, 5, announce=False)
    sequence.schedule(5)
    assert [len(t) for t in sequence.block_tables] == [2]
    assert manager.allocator.live_slots == 5
    manager.check([sequence])


def test_a_prefix_is_found_after_its_owner_has_gone() -> None:
    manager = KVCacheManager(8, SIZE)
    first = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert admit(manager, first) == 0
    table = list(first.block_tables[0])
    manager.free(first)
    second = make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 50])
    assert admit(manager, second) == 8
    assert second.block_tables[0][:2] == table[:2]
    manager.check([second])


@pytest.mark.parametrize("length", [3, 4, 5, 7, 8, 9, 12])
def test_the_last_token_is_never_taken_from_the_cache(length: int) -> None:
    manager = KVCacheManager(16, SIZE)
    tokens = list(range(length))
    first, second = make_sequence([*tokens, 90, 91, 92, 93, 94]), make_sequence(tokens)
    admit(manager, first)
    assert admit(manager, second) == length - 1, "full blocks, then all but the last token by copy"
    manager.check([first, second])


def test_a_partly_matching_block_is_reused_by_copy_not_shared() -> None:
    manager = KVCacheManager(8, SIZE)
    first, second = make_sequence([1, 2, 3, 4, 9]), make_sequence([1, 2, 3, 70, 71])
    admit(manager, first)
    manager.take_deltas()
    assert admit(manager, second) == 3
    _, copies = manager.take_deltas()
    assert copies == ((first.block_tables[0][0], second.block_tables[0][0]),)
    stats = manager.stats()
    assert (stats.block_copies_total, stats.copy_on_write_total, stats.num_shared_blocks) == (1, 0, 0)
    manager.check([first, second])


def test_partial_reuse_is_dropped_when_only_the_source_is_free() -> None:
    manager = KVCacheManager(2, SIZE)
    first = make_sequence([1, 2, 3, 4])
    admit(manager, first)
    manager.free(first)
    other = make_sequence([8, 8])
    admit(manager, other)
    second = make_sequence([1, 2, 3, 9])
    manager.take_deltas()
    assert admit(manager, second) == 0
    assert manager.take_deltas()[1] == ()
    manager.check([other, second])


def test_another_salt_shares_nothing() -> None:
    manager = KVCacheManager(16, SIZE)
    tokens = list(range(12))
    admit(manager, make_sequence(tokens, salt="a"))
    assert admit(manager, make_sequence(tokens, salt="b")) == 0
    assert admit(manager, make_sequence(tokens, salt="a")) == 11


def test_without_prefix_caching_nothing_is_named_but_forks_share() -> None:
    manager = KVCacheManager(8, SIZE, enable_prefix_caching=False)
    first, second = make_sequence(list(range(9))), make_sequence(list(range(9)))
    admit(manager, first)
    assert admit(manager, second) == 0
    assert manager.stats().num_cached_blocks == 0
    child = make_sequence(list(range(9)))
    manager.fork(first, child)
    assert child.block_tables == first.block_tables
    assert manager.stats().num_shared_blocks == 3


def test_writers_of_a_shared_block_copy_it_and_the_last_one_keeps_it() -> None:
    manager = KVCacheManager(8, SIZE)
    parent = make_sequence(list(range(6)))
    admit(manager, parent)
    children = [make_sequence(list(range(6))) for _ in range(2)]
    for row, child in enumerate(children, start=1):
        manager.fork(parent, child)
        child.row, child.num_computed_tokens = row, 6
    family = [parent, *children]
    manager.check(family)
    shared = parent.block_tables[0][1]
    manager.take_deltas()
    for token, sequence in enumerate(family):
        generate(manager, sequence, token)
    new_blocks, copies = manager.take_deltas()
    assert [source for source, _ in copies] == [shared, shared]
    assert children[1].block_tables[0][1] == shared, "nobody else holds it any more"
    assert [(b.row, b.start, b.block_ids) for b in new_blocks] == [
        (0, 1, (copies[0][1],)),
        (1, 1, (copies[1][1],)),
    ]
    assert manager.stats().copy_on_write_total == 2
    manager.check(family)


@pytest.mark.parametrize(("num_blocks", "fits"), [(6, True), (5, False)])
def test_a_copy_never_lands_on_the_source_of_another(num_blocks: int, fits: bool) -> None:
    manager = KVCacheManager(num_blocks, SIZE, enable_prefix_caching=False)
    families = []
    for token in (1, 2):
        parent, child = make_sequence([token] * 6), make_sequence([token] * 6)
        admit(manager, parent)
        manager.fork(parent, child)
        child.row, child.num_computed_tokens = 1, 6
        families.append((parent, child))
    (first, gone), (second, other) = families
    manager.take_deltas()
    source = first.block_tables[0][1]
    generate(manager, first, 3)
    manager.free(gone)  # preempted in the same step: the source is free, and would be reused first
    second.append(3)
    assert manager.allocate_slots(second, 1) == fits
    _, copies = manager.take_deltas()
    assert len(copies) == 1 + fits
    assert source not in {destination for _, destination in copies}
    assert manager.allocate_slots(second, 1), "the next step may use it"
    second.schedule(1)
    manager.check([first, second, other])


def test_out_of_blocks_changes_nothing() -> None:
    manager = KVCacheManager(2, SIZE)
    sequence = make_sequence(list(range(8)))
    admit(manager, sequence)
    sequence.append(1)
    before = manager.stats()
    assert not manager.allocate_slots(sequence, 1)
    assert manager.stats() == before
    manager.check([sequence])


def test_equal_blocks_computed_twice_keep_one_name() -> None:
    manager = KVCacheManager(8, SIZE)
    twins = [make_sequence([1, 2, 3, 4, 5]) for _ in range(2)]
    for twin in twins:  # both start before either commits
        manager.begin(twin, manager.match_prefix(twin))
        assert manager.allocate_slots(twin, 5, announce=False)
        twin.schedule(5)
    for twin in twins:
        twin.retire(5, True)
        manager.commit(twin)
    assert manager.stats().num_cached_blocks == 1
    assert twins[0].block_tables[0][0] != twins[1].block_tables[0][0], "tables are not swapped"
    manager.check(twins)


def test_claims_last_until_commit_or_until_given_up() -> None:
    manager = KVCacheManager(8, SIZE)
    first, second = make_sequence(list(range(9))), make_sequence(list(range(9)))
    manager.begin(first, manager.match_prefix(first))
    wanted = manager.match_prefix(second).next_name
    assert manager.is_claimed(wanted)
    compute(manager, first, 4, announce=False)
    assert not manager.is_claimed(wanted)
    assert manager.is_claimed(manager.match_prefix(second).next_name), "the second block is still being computed"
    manager.free(first)
    assert not manager.is_claimed(manager.match_prefix(second).next_name)
    manager.check([])


def test_beginnings_stay_cached_longest() -> None:
    manager = KVCacheManager(4, SIZE)
    sequence = make_sequence(list(range(16)))
    admit(manager, sequence)
    manager.free(sequence)
    admit(manager, make_sequence([90]))
    match = manager.match_prefix(make_sequence(list(range(17))))
    assert [len(blocks) for blocks in match.blocks] == [3], "the newcomer took the last block"


def test_utilisation_counts_written_slots_of_used_blocks() -> None:
    manager = KVCacheManager(8, SIZE)
    gone, sequence = make_sequence([9] * 8), make_sequence(list(range(5)))
    admit(manager, gone)
    manager.free(gone)
    manager.record_step()
    admit(manager, sequence)
    manager.record_step()
    stats = manager.stats()
    assert (stats.live_slot_steps_total, stats.used_slot_steps_total, stats.min_utilization) == (5, 8, 5 / 8)


def test_every_group_has_its_own_table_and_a_match_needs_all_groups() -> None:
    manager = KVCacheManager(12, SIZE, num_groups=2)
    first = make_sequence(list(range(9)))
    admit(manager, first)
    tables = first.block_tables
    assert [len(t) for t in tables] == [3, 3]
    assert not set(tables[0]) & set(tables[1])
    manager.free(first)
    second = make_sequence([*range(8), 77])
    assert admit(manager, second) == 8
    assert [t[:2] for t in second.block_tables] == [t[:2] for t in tables]
    manager.check([second])


class ManagerLife(RuleBasedStateMachine):
    """Random lives of sequences over a small pool; every slot a sequence would read holds its own history."""

    def __init__(self) -> None:
        super().__init__()
        self.manager = KVCacheManager(12, SIZE)
        self.held: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}

    def _step(self, sequence: Sequence, start: int) -> None:
        """Apply copies, then write what was computed from `start` on."""
        _, copies = self.manager.take_deltas()
        assert not {s for s, _ in copies} & {d for _, d in copies}
        for source, destination in copies:
            for slot in range(SIZE):
                self.memory[destination, slot] = self.memory.get((source, slot), ())
        for position in range(start, sequence.position):
            place = sequence.block_tables[0][position // SIZE], position % SIZE
            self.memory[place] = tuple(sequence.token_ids[: position + 1])

    def _admit(self, sequence: Sequence) -> bool:
        match = self.manager.match_prefix(sequence)
        if self.manager.num_blocks_to_admit(sequence, match) > self.manager.num_free_blocks:
            return False
        cached = admit(self.manager, sequence)
        self._step(sequence, cached)
        self.held.append(sequence)
        return True

    @rule(stem=st.integers(0, 12), tail=TAILS, salt=st.sampled_from("ab"))
    def start(self, stem: int, tail: list[int], salt: str) -> None:
        self._admit(make_sequence([5] * stem + tail, salt))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0), tokens=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def append(self, which: int, tokens: list[int]) -> None:
        sequence = self.held[which % len(self.held)]
        for token in tokens:
            if not self.manager.allocate_slots(sequence, 1):
                break
            start = sequence.position
            sequence.append(token)
            sequence.retire(start + 1, sequence.schedule(1))
            self._step(sequence, start)
            self.manager.commit(sequence)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0))
    def fork(self, which: int) -> None:
        parent = self.held[which % len(self.held)]
        child = make_sequence(list(parent.token_ids), parent.request.cache_salt)
        self.manager.fork(parent, child)
        child.row, child.num_computed_tokens = 1, parent.num_computed_tokens
        self.held.append(child)

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0))
    def finish(self, which: int) -> None:
        self.manager.free(self.held.pop(which % len(self.held)))

    @precondition(lambda self: self.held)
    @rule(which=st.integers(0))
    def preempt(self, which: int) -> None:
        sequence = self.held.pop(which % len(self.held))
        self.manager.free(sequence)
        self.preempted.append(sequence)

    @precondition(lambda self: self.preempted)
    @rule(which=st.integers(0))
    def resume(self, which: int) -> None:
        sequence = self.preempted[which % len(self.preempted)]
        if self._admit(sequence):
            self.preempted.remove(sequence)

    @invariant()
    def all_is_well(self) -> None:
        self.manager.check(self.held)
        for sequence in self.held:
            for position in range(sequence.position):
                place = sequence.block_tables[0][position // SIZE], position % SIZE
                assert self.memory[place] == tuple(sequence.token_ids[: position + 1])


TestManagerLife = ManagerLife.TestCase
TestManagerLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_no_block_is_lost_in_100_000_operations() -> None:
    rng = random.Random(7)
    life = ManagerLife()
    num_operations = 0
    while num_operations < 100_000:
        num_operations += 1
        match rng.randrange(8):
            case 0 | 1:
                tail = [rng.randrange(3) for _ in range(rng.randrange(1, 7))]
                life.start(rng.randrange(13), tail, rng.choice("ab"))
            case 2 | 3 | 4 if life.held:
                life.append(rng.randrange(100), [rng.randrange(3)])
            case 5 if life.held:
                life.fork(rng.randrange(100))
            case 6 if life.held:
                life.finish(rng.randrange(100)) if rng.random() < 0.7 else life.preempt(rng.randrange(100))
            case 7 if life.preempted:
                life.resume(rng.randrange(100))
        while len(life.held) > 8:
            life.finish(rng.randrange(100))
        if num_operations % 250 == 0:
            life.all_is_well()
    stats = life.manager.stats()
    assert min(stats.evictions_total, stats.copy_on_write_total, stats.block_copies_total) > 1000
    while life.held:
        life.finish(0)
    life.all_is_well()
    assert life.manager.num_free_blocks == 12
