"""The allocators under one budget: every slot is accounted for at every step, and every token is generated once."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest import cli
from loadtest.kv_contiguous import Contiguous, Holes, KvAllocator, KvRequest, power_of_two
from loadtest.kv_simulator import Simulation
from loadtest.kv_waste import Paged, compare_allocators
from loadtest.lengths import UsageError

MAX_LEN, CAPACITY = 128, 640


def requests_of(shapes: list[tuple[int, int]], prefix: int = 0) -> list[KvRequest]:
    random = Random(5)
    shared = tuple(random.choices(range(1000), k=prefix))
    return [
        KvRequest(key, shared + tuple(random.choices(range(1000, 9000), k=prompt - prefix + output)), prompt)
        for key, (prompt, output) in enumerate(shapes)
    ]


def allocators() -> list[KvAllocator]:
    return [
        Contiguous(CAPACITY, MAX_LEN), Contiguous(CAPACITY, None), Paged(CAPACITY, 16, share_prefixes=False),
        Paged(CAPACITY, 16, share_prefixes=True),
    ]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(24, 80), st.integers(1, 48)), min_size=1, max_size=25), st.sampled_from([0, 24]))
def test_every_slot_is_accounted_for(shapes: list[tuple[int, int]], prefix: int) -> None:
    for allocator in allocators():
        requests = requests_of(shapes, prefix)
        simulation = Simulation(allocator, requests)
        while simulation.waiting or simulation.running:
            simulation.step()
            usage = allocator.usage()
            assert usage.live + usage.reserved + usage.internal + usage.free == allocator.capacity
            assert min(usage.live, usage.reserved, usage.internal, usage.free) >= 0
            assert usage.logical >= usage.live
            assert usage.logical == sum(simulation.num_tokens[request.key] for request in simulation.running)
            if isinstance(allocator, Paged):
                allocator.manager.check(sequence for _, sequence in allocator._sequences.values())
        outcome = simulation.run()
        assert outcome.num_tokens == sum(output for _, output in shapes)
        assert allocator.usage().free == allocator.capacity, "all memory came back"
        if outcome.num_full_steps:
            assert sum(outcome.shares.values()) == pytest.approx(1.0)


def test_the_papers_order() -> None:
    random = Random(2)
    shapes = [(random.randint(24, 60), random.randint(4, 60)) for _ in range(120)]
    reserved, doubling, paged, shared = compare_allocators(requests_of(shapes, prefix=24), CAPACITY, MAX_LEN)
    assert reserved.shares["live"] < doubling.shares["live"] < paged.shares["live"]
    assert paged.shares["live"] > 0.85
    assert paged.shares["external"] == 0, "any free block serves any sequence"
    assert paged.shares["internal"] < 0.05 < doubling.shares["internal"] < reserved.shares["internal"]
    assert reserved.batch == CAPACITY // MAX_LEN == 5, "as many as there are whole reservations"
    assert reserved.batch < doubling.batch < paged.batch < shared.batch
    assert shared.sharing > 1.2
    assert paged.sharing == reserved.sharing == 1
    assert reserved.num_preemptions == 0


def test_holes_are_first_fit_and_merge() -> None:
    holes = Holes(100)
    starts = [holes.take(30), holes.take(30), holes.take(30)]
    assert starts == [0, 30, 60]
    assert holes.take(11) is None
    holes.give(30, 30)
    assert holes.free == 40
    assert holes.take(31) is None, "external fragmentation: 40 free, 31 do not fit"
    assert not holes.take_at(29, 5)
    assert holes.take_at(30, 10)
    holes.give(0, 30)
    holes.give(60, 30)
    holes.give(30, 10)
    assert holes.take(100) == 0


def test_doubling_moves_only_when_its_neighbour_is_taken() -> None:
    allocator = Contiguous(64, None)
    first, second = requests_of([(8, 30), (8, 30)])
    assert allocator.admit(first, 8)
    assert allocator.grow(first)
    assert allocator.num_moves == 0, "grew in place"
    assert allocator.admit(second, 8)
    for _ in range(7):
        assert allocator.grow(first)
    assert allocator.grow(first)
    assert allocator.num_moves == 1
    assert allocator.usage().live == 17 + 8
    assert [power_of_two(number) for number in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]


def test_what_never_fits_is_said() -> None:
    with pytest.raises(UsageError, match="does not fit"):
        Simulation(Contiguous(64, None), requests_of([(70, 3)])).run()
    with pytest.raises(UsageError, match="longest request has 140"):
        compare_allocators(requests_of([(100, 40)]), CAPACITY, MAX_LEN)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "kv_waste",
        "--requests",
        "60",
        "--memory-mib",
        "60",
        "--prompt-len",
        "64",
        "--output-len",
        "uniform:4:64",
    ]
    paths = ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.png")]
    assert cli.main([*flags, "--prefix-len", "32", "--max-model-len", "512", *paths]) == 0
    assert len(json.loads((tmp_path / "r.json").read_text())) == 4
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert "paged, blocks of 16, prefixes shared" in capsys.readouterr().out
    assert cli.main([*flags, "--max-model-len", "10"]) == 2
