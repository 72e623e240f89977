"""Beam searches among other requests, squeezed, aborted, failing: each finds what it finds alone, nothing leaks."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.beam import num_blocks_needed
from engine.outputs import TokenLogprobs
from engine.sampling_params import BeamSearch, SamplingParams
from tests.engine import fake_runner
from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_runner import EOS
from tests.engine.test_scheduler_random import play


def maybe_search(rng: random.Random, engine: FakeEngine, prompt: list[int], params: SamplingParams) -> SamplingParams:
    """Half of the requests become beam searches, if the pool and the rows could hold them alone."""
    beam = BeamSearch(rng.choice([1, 2, 3, 5]), rng.choice([1.0, 0.0, -1.0, 2.0]), rng.choice([True, False, "never"]))
    if rng.random() < 0.5 or params.max_tokens == 0:
        return params
    manager = engine.scheduler.manager
    room = engine.max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    needed = num_blocks_needed(beam, len(prompt), limit, manager.block_size) * manager.num_groups
    if beam.width > engine.scheduler._config.max_num_seqs or needed > manager.allocator.num_blocks:
        return params
    return replace(params, n=rng.randint(1, beam.width), beam=beam, prompt_logprobs=None)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_life(seed: int, depth: int) -> None:
    play(seed, depth=depth, change=maybe_search)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(min_value=1000), depth=st.sampled_from([1, 2]))
def test_random_life_with_any_seed(seed: int, depth: int) -> None:
    play(seed, depth=depth, num_turns=30, change=maybe_search)


def search_of(width: int, n: int = 1, **options: object) -> SamplingParams:
    return SamplingParams(n=n, ignore_eos=True, beam=BeamSearch(width), **options)  # type: ignore[arg-type]


def test_hypotheses_share_the_prompts_blocks_without_prefix_caching() -> None:
    engine = FakeEngine(num_blocks=24, block_size=4, max_model_len=80, prefix_caching=False)
    engine.add(list(range(32)), search_of(4, n=4, max_tokens=12))
    engine.run()
    engine.verify()
    assert engine.runner.num_copies > 0
    assert max(stats.num_output_tokens for stats in engine.finished) == 12
    assert len(engine.finished) == 4


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_search_that_just_fits_survives_being_preempted_again_and_again(prefix_caching: bool, depth: int) -> None:
    prompt = list(range(30))
    params = search_of(4, n=2, max_tokens=40)
    assert params.beam is not None
    needed = num_blocks_needed(params.beam, 30, 40, 4)
    engine = FakeEngine(
        num_blocks=needed, block_size=4, max_model_len=80, max_num_seqs=4, depth=depth, prefix_caching=prefix_caching
    )
    engine.add(prompt, params)
    for turn in range(200):
        if turn % 7 == 6:
            engine.scheduler.preempt_all()
            engine.scheduler.check()
        engine.step()
    engine.run()
    engine.verify()
    assert max(stats.num_preemptions for stats in engine.finished) > 3


LONG = SamplingParams(max_tokens=14, ignore_eos=True)  # with 100 prompt tokens: 29 of 34 blocks
WIDE = search_of(8, max_tokens=12)  # with 10 prompt tokens: 34 blocks at most, about half of them in fact


@pytest.mark.parametrize("search_first", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_older_one_takes_the_memory_of_the_younger(search_first: bool, depth: int) -> None:
    engine = FakeEngine(num_blocks=34, block_size=4, max_model_len=120, max_num_seqs=9, budget=256, depth=depth)
    requests = [(list(range(50)) * 2, LONG), (list(range(49, 39, -1)), WIDE)]
    for prompt, params in reversed(requests) if search_first else requests:
        engine.add(prompt, params)
    engine.run()
    engine.verify()
    preempted = {stats.num_prompt_tokens: stats.num_preemptions > 0 for stats in engine.finished}
    assert preempted == {100: search_first, 10: not search_first}


def test_a_search_waits_until_all_its_rows_are_free_and_keeps_them() -> None:
    engine = FakeEngine(max_num_seqs=4, num_blocks=200)
    engine.add([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.add([4, 5, 6], search_of(4, max_tokens=8))
    engine.add([7, 8, 9], SamplingParams(max_tokens=5, ignore_eos=True))
    engine.run()
    engine.verify()
    reasons = [stats.num_output_tokens for stats in engine.finished]
    assert reasons == [5, 8, 5], "in order of arrival"


def test_one_result_may_be_given_up_while_the_search_goes_on() -> None:
    engine = FakeEngine()
    stream = engine.add([1, 2, 3], search_of(3, n=3, max_tokens=20))
    for _ in range(5):
        engine.step()
    engine.abort(stream, 0, 0)
    engine.run()
    assert engine.texts[stream, 0, 0].finish_reason == "abort"
    engine.verify()
    assert engine.texts[stream, 0, 2].finish_reason == "length"


def test_the_first_word_of_a_search_comes_before_its_end() -> None:
    engine = FakeEngine()
    stream = engine.add([1, 2, 3], search_of(2, max_tokens=20))
    engine.step()
    assert len(engine.texts[stream, 0, 0].outputs) == 1
    assert engine.texts[stream, 0, 0].token_ids == []
    engine.run()
    assert [len(output.token_ids) for output in engine.texts[stream, 0, 0].outputs] == [0, 20]


def test_a_model_that_bans_nearly_all_tokens_gives_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    only = TokenLogprobs((EOS, 5), (-1.0, -2.0))
    monkeypatch.setattr(fake_runner, "candidates", lambda token_ids, count: only)
    engine = FakeEngine()
    stream = engine.add([1, 2, 3], SamplingParams(n=4, max_tokens=2, beam=BeamSearch(4)))
    engine.run()
    found = [engine.texts[stream, 0, choice] for choice in range(4)]
    assert [text.finish_reason for text in found] == ["stop", "stop", "length", "error"]
    assert [text.token_ids for text in found] == [[EOS], [5, EOS], [5, 5], []]


@pytest.mark.parametrize(("width", "max_tokens"), [(9, 4), (8, 150)])
def test_a_search_that_could_never_be_held_is_refused(width: int, max_tokens: int) -> None:
    engine = FakeEngine(num_blocks=64, max_num_seqs=8)
    with pytest.raises(ValueError, match="beam search"):
        engine.add([1] * 30, search_of(width, max_tokens=max_tokens))
    engine.scheduler.check()
    assert not engine.scheduler.has_work


def test_a_failing_step_ends_the_whole_search_and_nobody_else() -> None:
    engine = FakeEngine(fails=lambda batch, index: batch.step_id == 4 and index == 2)
    other = engine.add([9, 9], SamplingParams(max_tokens=20, ignore_eos=True))
    stream = engine.add([1, 2, 3], search_of(3, n=2, max_tokens=20))
    engine.run()
    engine.verify()
    assert [engine.texts[stream, 0, choice].finish_reason for choice in range(2)] == ["error", "error"]
    assert engine.texts[other, 0, 0].finish_reason == "length"
