"""Pictures of the engine: what a cell says, what is bounded, what nobody asked for."""

from __future__ import annotations

from engine import painter as module
from engine.painter import MAX_CELLS, MAX_SEQUENCES, Painter
from engine.sampling_params import SamplingParams
from tests.engine.fake_engine import FakeEngine


def test_cells_tell_holders_and_names() -> None:
    engine = FakeEngine(num_blocks=16)
    engine.add(list(range(40)), SamplingParams(max_tokens=60, n=3, ignore_eos=True))
    painter = Painter(engine.scheduler)
    assert painter.paint(0.0).cells == bytes(16)
    for _ in range(4):
        engine.step()
    picture = painter.paint(engine.now)
    blocks = engine.scheduler.manager.allocator.blocks
    assert list(picture.cells) == [2 * block.ref_count + (block.name is not None) for block in blocks]
    assert sorted(picture.cells)[-2:] == [7, 7], "the prompt's full blocks: three holders, and a name"
    engine.run()
    done = painter.paint(engine.now)
    assert set(done.cells) == {0, 1}, "all free, some with content that can be found again"
    assert done.running == done.waiting == ()


def test_sequences_are_told_as_far_as_they_are() -> None:
    engine = FakeEngine(max_num_seqs=2, budget=32, chunk=32)
    for _ in range(5):
        engine.add([1, 2, 3] * 15, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.step()
    picture = Painter(engine.scheduler).paint(engine.now + 2)
    first = picture.running[0]
    assert (first.stream_id, first.num_prompt_tokens, first.num_computed_tokens) == (0, 45, 32)
    assert (first.num_output_tokens, first.max_output_tokens, first.num_blocks) == (0, 9, 2)
    assert first.age_s == engine.now + 2
    assert [view.stream_id for view in picture.waiting] == [1, 2, 3, 4]
    engine.run()


def test_a_sequence_is_told_with_its_adapter() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for stream, adapter in enumerate([("sql", 1), ("", 0)]):
        engine.add([1, 2, 3], SamplingParams(max_tokens=2), stream=stream, adapter=adapter)
    engine.step()
    picture = Painter(engine.scheduler).paint(0.0)
    assert [view.adapter for view in (*picture.running, *picture.waiting)] == ["sql", ""]
    engine.run()


def test_a_picture_is_bounded() -> None:
    engine = FakeEngine(num_blocks=3 * MAX_CELLS - 5)
    for _ in range(MAX_SEQUENCES + 20):
        engine.add([1, 2, 3], SamplingParams(max_tokens=2))
    engine.step()
    picture = Painter(engine.scheduler).paint(0.0)
    assert picture.blocks_per_cell == 3
    assert len(picture.cells) == MAX_CELLS - 1
    assert len(picture.waiting) == MAX_SEQUENCES


def test_a_cell_of_several_blocks_tells_the_most_held_and_how_many_are_used() -> None:
    engine = FakeEngine(num_blocks=2 * MAX_CELLS)
    allocator = engine.scheduler.manager.allocator
    painter = Painter(engine.scheduler)
    first, second, third = (allocator.allocate() for _ in range(3))
    assert [first.block_id, second.block_id, third.block_id] == [0, 1, 2]
    allocator.share(second)
    cells = painter.paint(0.0).cells
    assert cells[:3] == bytes([15 << 4 | 4, 7 << 4 | 2, 0])


def test_a_large_pool_is_read_in_turns(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "MAX_CELLS", 8)
    monkeypatch.setattr(module, "MAX_BLOCKS_READ", 16)
    engine = FakeEngine(num_blocks=32)
    painter = Painter(engine.scheduler)
    for _ in range(32):
        engine.scheduler.manager.allocator.allocate()
    full = 15 << 4 | 2
    assert list(painter.paint(0.0).cells) == [full] * 4 + [0] * 4
    assert list(painter.paint(0.0).cells) == [full] * 8
