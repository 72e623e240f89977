"""One rule of the scheduler each. Whatever else a test looks at, `run_and_verify` compares all texts."""

from __future__ import annotations

import pickle

import pytest

from engine.batch import ScheduledBatch, StepOutput
from engine.config import SchedulerConfig
from engine.kv.manager import KVCacheManager
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Request
from engine.step import Changes
from tests.engine.fake_engine import FakeEngine
from tests.engine.fake_runner import EOS


def forever(num_tokens: int, **kwargs: object) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **kwargs)


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + i) % 50 for i in range(length)]


def run_and_verify(engine: FakeEngine) -> None:
    engine.run()
    engine.verify()


def chunks(batch: ScheduledBatch) -> list[int]:
    return [row.num_scheduled for row in batch.rows]


# -- budget and chunks


def test_a_lone_prompt_takes_the_whole_budget() -> None:
    engine = FakeEngine(budget=64, chunk=16)
    engine.add(prompt(150), forever(2))
    run_and_verify(engine)
    assert [chunks(b) for b in engine.batches] == [[64], [64], [22], [1]]


def test_beside_decoding_a_prompt_comes_in_chunks() -> None:
    engine = FakeEngine(budget=64, chunk=16)
    engine.add(prompt(8), forever(20))
    engine.step()
    engine.add(prompt(50, 7), forever(2))
    run_and_verify(engine)
    assert [chunks(b) for b in engine.batches[:6]] == [[8], [1, 16], [1, 16], [1, 16], [1, 2], [1, 1]]


def test_running_sequences_get_their_token_in_every_step_whatever_waits() -> None:
    engine = FakeEngine(budget=16, chunk=16, max_num_seqs=8, num_blocks=200)
    for stream in range(4):
        engine.add(prompt(4, stream), forever(30))
    engine.step()
    for stream in range(4):
        engine.add(prompt(100, 20 + stream), forever(4))
    for _ in range(29):
        engine.step()
        assert [r.num_scheduled for r in engine.batches[-1].rows[:4]] == [1] * 4
        assert engine.batches[-1].num_tokens <= 16
    run_and_verify(engine)


def test_prompts_beside_decoding_share_one_chunk() -> None:
    engine = FakeEngine(budget=64, chunk=16)
    engine.add([1], forever(30))
    engine.step()
    for stream in range(3):
        engine.add(prompt(10, 20 + stream), forever(9))
    for expected in ([1, 10, 6], [1, 1, 4, 10], [1, 1, 1, 1]):
        engine.step()
        assert chunks(engine.batches[-1]) == expected
    run_and_verify(engine)


# -- the queue


def test_first_come_first_served_and_never_more_rows_than_allowed() -> None:
    engine = FakeEngine(max_num_seqs=2)
    for stream in range(5):
        engine.add(prompt(4, stream), forever(3), stream=stream)
    run_and_verify(engine)
    assert max(len(b.rows) for b in engine.batches) == 2
    started = [request.sequences[0].scheduled_s for request, _ in engine.requests.values()]
    assert started == sorted(started, key=lambda s: s or 0.0)
    assert len(set(started)) > 1


def test_what_does_not_fit_holds_back_what_comes_later() -> None:
    engine = FakeEngine(num_blocks=16, max_model_len=256, budget=512, max_num_seqs=4)
    engine.add(prompt(150), forever(20))
    engine.step()
    big = engine.add(prompt(150, 5), forever(2))
    small = engine.add(prompt(5, 9), forever(2))
    engine.step()
    assert [s.request.stream_id for s in engine.scheduler.queues.waiting] == [big, small]
    run_and_verify(engine)


@pytest.mark.parametrize(("num_blocks", "admitted"), [(16, 1), (17, 2)])
def test_the_newcomer_leaves_a_block_of_headroom_for_each_that_runs(num_blocks: int, admitted: int) -> None:
    engine = FakeEngine(num_blocks=num_blocks, budget=512)
    engine.add(prompt(120), forever(40))
    engine.add(prompt(120, 9), forever(2))
    engine.step()
    assert len(engine.scheduler.queues.running) == admitted
    run_and_verify(engine)


def test_the_place_in_the_queue_belongs_to_the_request_not_to_its_first_choice() -> None:
    engine = FakeEngine(max_num_seqs=1)
    for stream in range(4):
        engine.add(prompt(4, stream), forever(4, n=2))
    engine.abort(1, 0, 0)
    assert [(s.request.stream_id, s.choice_index) for s in engine.scheduler.queues.waiting] == [
        (0, 0),
        (1, 1),
        (2, 0),
        (3, 0),
    ]
    run_and_verify(engine)


def test_the_preempted_go_to_the_front_in_their_old_order() -> None:
    engine = FakeEngine(max_num_seqs=3)
    for stream in range(5):
        engine.add(prompt(4, stream), forever(9))
    engine.step()
    engine.scheduler.preempt_all()
    assert [s.request.stream_id for s in engine.scheduler.queues.waiting] == [0, 1, 2, 3, 4]
    run_and_verify(engine)


def test_counts_of_waiting_and_running() -> None:
    engine = FakeEngine(max_num_seqs=2)
    engine.add(prompt(4), forever(4, n=3))
    engine.add(prompt(6, 9), forever(4))
    assert (
        engine.scheduler.queues.num_waiting,
        len(engine.scheduler.queues.running),
        engine.scheduler.queues.num_waiting_tokens,
    ) == (
        4,
        0,
        10,
    )
    engine.step()
    assert (engine.scheduler.queues.num_waiting, len(engine.scheduler.queues.running)) == (2, 2)
    run_and_verify(engine)
    assert (engine.scheduler.queues.num_waiting, len(engine.scheduler.queues.running), engine.scheduler.has_work) == (
        0,
        0,
        False,
    )


def test_refuses_what_can_never_run() -> None:
    with pytest.raises(ValueError, match="needs 16 blocks"):
        Scheduler(SchedulerConfig(), KVCacheManager(15, 16), 256)
    scheduler = Scheduler(SchedulerConfig(), KVCacheManager(16, 16), 256)
    for tokens in ([], prompt(256)):
        with pytest.raises(ValueError, match="cannot be served"):
            scheduler.add(Request(0, 0, tokens, SamplingParams(), seed=0))
    assert not scheduler.has_work


def test_a_sequence_of_the_full_length_runs_in_a_pool_of_just_that_length() -> None:
    engine = FakeEngine(num_blocks=4, max_model_len=64, max_num_seqs=3)
    for stream in range(3):
        engine.add(prompt(20, stream), SamplingParams(max_tokens=None, ignore_eos=True))
    run_and_verify(engine)
    assert all(s.num_output_tokens == 44 for s in engine.finished)


# -- the prompt's logprobs


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 33, 100])
def test_a_prompt_is_scored_whole_whatever_the_cache_holds(length: int, depth: int) -> None:
    engine = FakeEngine(depth=depth, budget=32)
    engine.add(prompt(length), forever(4))
    run_and_verify(engine)
    warm = engine.add(prompt(length), forever(4, prompt_logprobs=0))
    run_and_verify(engine)  # verify holds the scores to the prompt
    assert engine.requests[warm, 0][0].num_cached_tokens == 0


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("length", [1, 40, 256])
def test_without_output_the_prompt_is_computed_and_nothing_is_sampled(length: int, n: int, depth: int) -> None:
    engine = FakeEngine(depth=depth)
    engine.add(prompt(length), SamplingParams(max_tokens=0, n=n, prompt_logprobs=0))
    run_and_verify(engine)
    assert all(row.logits_from is None for batch in engine.batches for row in batch.rows)
    assert engine.runner.num_computed_tokens == length
    assert [(s.finish_reason, s.num_output_tokens) for s in engine.finished] == [("length", 0)] * n


@pytest.mark.parametrize("depth", [1, 2])
def test_a_preempted_prompt_goes_on_where_its_scores_ended(depth: int) -> None:
    engine = FakeEngine(depth=depth, budget=32, chunk=32)
    engine.add(prompt(100), SamplingParams(max_tokens=2, prompt_logprobs=0, ignore_eos=True))
    for _ in range(3):
        engine.step()
        engine.scheduler.preempt_all()
    run_and_verify(engine)
    scored = [position for batch in engine.batches for row in batch.rows for position in row.scored]
    assert scored == list(range(99))


def test_who_is_scored_waits_for_nobody_and_others_still_wait_for_it() -> None:
    engine = FakeEngine(budget=512, chunk=512)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    for stream in range(2):
        engine.add(prompt(64), params, stream=stream)
    engine.add(prompt(64), SamplingParams(max_tokens=1), stream=2)
    engine.step()
    assert chunks(engine.batches[0]) == [64, 64]
    run_and_verify(engine)
    assert engine.requests[2, 0][0].num_cached_tokens == 63


# -- ends


def test_an_end_token_ends_and_is_delivered_last() -> None:
    engine = FakeEngine(max_model_len=250)
    for seed in range(6):
        engine.add(prompt(5), SamplingParams(max_tokens=240), seed=seed)
    run_and_verify(engine)
    stopped = [t for t in engine.texts.values() if t.finish_reason == "stop"]
    assert stopped
    for text in stopped:
        assert text.token_ids[-1] == text.outputs[-1].stop_token_id == EOS
        assert EOS not in text.token_ids[:-1]
        assert all(o.stop_token_id is None for o in text.outputs[:-1])


@pytest.mark.parametrize("depth", [1, 2])
def test_nothing_is_sampled_past_max_tokens(depth: int) -> None:
    engine = FakeEngine(depth=depth)
    engine.add(prompt(5), forever(1))
    engine.add(prompt(5, 3), forever(4))
    run_and_verify(engine)
    assert engine.scheduler.step_stats().num_discarded_tokens_total == 0
    assert engine.runner.num_computed_tokens == 5 + 5 + 3, "the last token is never computed"


def test_a_token_sampled_behind_an_end_token_is_discarded_and_counted() -> None:
    engine = FakeEngine(depth=2, max_model_len=250)
    engine.add(prompt(5), SamplingParams(max_tokens=240), seed=0)
    run_and_verify(engine)
    assert engine.texts[0, 0, 0].finish_reason == "stop"
    assert engine.scheduler.step_stats().num_discarded_tokens_total == 1


# -- prefix cache


def test_sixteen_requests_with_one_prefix_compute_it_once() -> None:
    engine = FakeEngine(num_blocks=300, max_model_len=1200, max_num_seqs=16, budget=2048, chunk=512)
    shared = prompt(1024)
    for stream in range(16):
        engine.add([*shared, *prompt(32, stream + 1)], forever(3), stream=stream)
    run_and_verify(engine)
    assert engine.runner.num_computed_tokens == 1024 + 16 * (32 + 2)
    stats = engine.scheduler.step_stats().cache
    assert (stats.prefix_queries_total, stats.prefix_hits_total) == (16 * 1056, 15 * 1024)
    assert sorted(s.num_cached_tokens for s in engine.finished) == [0] + [1024] * 15


def test_who_waits_for_a_prefix_lets_others_pass() -> None:
    engine = FakeEngine(num_blocks=100, budget=140, chunk=130, max_num_seqs=4)
    engine.add(prompt(4, 30), forever(30))
    engine.step()
    for tokens in (prompt(100), prompt(100), prompt(100), prompt(20, 40), prompt(5, 41), prompt(5, 42)):
        engine.add(tokens, forever(2))
    engine.step()
    assert [s.request.stream_id for s in engine.scheduler.queues.running] == [0, 1, 4, 5]
    assert [s.request.stream_id for s in engine.scheduler.queues.waiting] == [2, 3, 6], "nobody loses a place"
    run_and_verify(engine)
    assert max(s.num_cached_tokens for s in engine.finished) == 96


@pytest.mark.parametrize("how", ["abort", "preempt", "fail"])
def test_who_waits_for_a_prefix_starts_when_its_owner_is_gone(how: str) -> None:
    engine = FakeEngine(num_blocks=100, budget=16, chunk=16, max_num_seqs=2)
    owner = engine.add(prompt(100), forever(2))
    engine.step()
    engine.add(prompt(100), forever(2))
    engine.step()
    assert len(engine.scheduler.queues.running) == 1
    if how == "abort":
        engine.abort(owner)
    elif how == "preempt":
        engine.scheduler.preempt_all()
    else:
        engine.fail_step()
    run_and_verify(engine)


def test_usage_counts_the_first_admission_only() -> None:
    engine = FakeEngine(num_blocks=64)
    engine.add(prompt(40), forever(20))
    for _ in range(5):
        engine.step()
    engine.scheduler.preempt_all()
    run_and_verify(engine)
    stats = engine.scheduler.step_stats()
    assert (stats.cache.prefix_queries_total, stats.cache.prefix_hits_total) == (40, 0)
    assert engine.texts[0, 0, 0].outputs[-1].num_cached_tokens == 0
    assert engine.finished[0].num_cached_tokens == 0
    assert stats.num_preemptions_total == engine.finished[0].num_preemptions == 1
    assert stats.num_recomputed_tokens_total == 12, "44 were computed, 32 of them lie in full, cached blocks"


def test_another_salt_waits_for_nobody() -> None:
    engine = FakeEngine(num_blocks=64, budget=128)
    engine.add(prompt(40), forever(2), salt="a")
    engine.add(prompt(40), forever(2), salt="b")
    engine.step()
    assert len(engine.scheduler.queues.running) == 2
    run_and_verify(engine)


def test_prompts_are_shared_under_one_adapter_and_not_between_two() -> None:
    engine = FakeEngine(num_blocks=64, budget=128)
    for stream, adapter in enumerate([("", 0), ("a", 1), ("b", 2), ("b", 2)]):
        engine.add(prompt(40), forever(2), stream=stream, adapter=adapter)
        run_and_verify(engine)
    assert [s.num_cached_tokens for s in engine.finished] == [0, 0, 0, 32]
    told = [new.adapter for batch in engine.batches for new in batch.new_rows]
    assert told == [0, 1, 2, 2]


# -- n > 1


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("length", [15, 16, 17, 70])
@pytest.mark.parametrize("depth", [1, 2])
def test_the_prompt_of_n_choices_is_computed_once(length: int, depth: int, prefix_caching: bool) -> None:
    engine = FakeEngine(depth=depth, prefix_caching=prefix_caching)
    engine.add(prompt(length), forever(9, n=4))
    run_and_verify(engine)
    assert engine.runner.num_computed_tokens == length + 4 * 8
    assert len({tuple(t.token_ids) for t in engine.texts.values()}) == 4
    stats = engine.scheduler.step_stats().cache
    assert stats.copy_on_write_total == stats.block_copies_total == (3 if length % 16 else 0)


def test_choices_without_a_row_run_later_on_the_cached_prompt() -> None:
    engine = FakeEngine(max_num_seqs=2)
    engine.add(prompt(65), forever(3, n=6))
    engine.step()
    engine.step()
    assert [s.choice_index for s in engine.scheduler.queues.waiting] == [2, 3, 4, 5]
    run_and_verify(engine)
    assert engine.runner.num_computed_tokens == 65 + 4 * 1 + 6 * 2
    stats = engine.scheduler.step_stats().cache
    assert stats.prefix_queries_total == 65, "one request, one query"


@pytest.mark.parametrize("when", [0, 1, 3, 6])
@pytest.mark.parametrize("choice", [0, 1])
@pytest.mark.parametrize("depth", [1, 2])
def test_abort_of_one_choice_leaves_its_siblings(when: int, choice: int, depth: int) -> None:
    engine = FakeEngine(budget=16, depth=depth, max_num_seqs=2)
    engine.add(prompt(40), forever(9, n=3))
    for _ in range(when):
        engine.step()
    engine.abort(0, 0, choice)
    run_and_verify(engine)
    assert sorted(t.finish_reason or "" for t in engine.texts.values()) == ["abort", "length", "length"]


# -- pressure


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_under_pressure_the_youngest_gives_way_and_all_texts_are_right(depth: int, prefix_caching: bool) -> None:
    engine = FakeEngine(num_blocks=16, max_num_seqs=8, depth=depth, prefix_caching=prefix_caching, budget=256)
    for stream in range(8):
        engine.add(prompt(20, stream), forever(100), stream=stream)
    run_and_verify(engine)
    assert engine.scheduler.step_stats().num_preemptions_total > 0
    assert engine.requests[0, 0][0].sequences[0].num_preemptions == 0, "the oldest never does"


def test_blocks_on_their_way_back_count_before_anybody_is_preempted() -> None:
    engine = FakeEngine(num_blocks=16, depth=2, budget=512)
    for stream, length in enumerate((60, 60, 76)):
        engine.add(prompt(length, stream), forever(30))
    for _ in range(21):  # until all three stand at the end of a block
        engine.step()
    assert engine.scheduler.manager.num_free_blocks == 0
    engine.abort(2)
    run_and_verify(engine)
    assert engine.scheduler.step_stats().num_preemptions_total == 0


def test_preempting_again_and_again_loses_no_token() -> None:
    engine = FakeEngine(num_blocks=64)
    for stream in range(4):
        engine.add(prompt(30, stream), forever(40, n=2), stream=stream)
    for turn in range(400):
        if turn % 9 == 8:
            engine.scheduler.preempt_all()
        if not engine.step():
            break
    run_and_verify(engine)
    assert all(s.num_preemptions >= 1 for s in engine.finished)


def test_blocks_of_an_aborted_stream_are_back_at_once_or_when_its_step_retires() -> None:
    for depth in (1, 2):
        engine = FakeEngine(depth=depth)
        engine.add(prompt(40), forever(50))
        engine.step()
        engine.step()
        engine.abort(0)
        held = engine.scheduler.manager.allocator.num_used
        assert (held > 0) == (depth == 2), "a step in flight still names them"
        engine.step()
        assert engine.scheduler.manager.allocator.num_used == 0


# -- failures and misuse


def test_a_failing_row_ends_alone() -> None:
    engine = FakeEngine(fails=lambda batch, index: batch.step_id == 3 and index == 1)
    for stream in range(3):
        engine.add(prompt(5, stream), forever(8), stream=stream)
    run_and_verify(engine)
    assert [engine.texts[s, 0, 0].finish_reason for s in range(3)] == ["length", "error", "length"]
    assert engine.texts[1, 0, 0].outputs[-1].error == "non-finite logits"


def test_choices_not_yet_forked_share_the_error_of_their_prompt() -> None:
    engine = FakeEngine(fails=lambda batch, index: batch.step_id == 0, budget=16)
    engine.add(prompt(40), forever(8, n=3))
    run_and_verify(engine)
    assert [t.finish_reason for t in engine.texts.values()] == ["error"] * 3


def test_a_failed_step_ends_its_sequences_and_nobody_else() -> None:
    engine = FakeEngine(max_num_seqs=2)
    for stream in range(4):
        engine.add(prompt(20, stream), forever(8), stream=stream)
    engine.step()
    engine.fail_step()
    run_and_verify(engine)
    assert [engine.texts[s, 0, 0].finish_reason for s in range(4)] == ["error", "error", "length", "length"]
    assert engine.texts[0, 0, 0].outputs[-1].error == "broken"


def test_a_later_step_can_fail_before_an_older_one_retires() -> None:
    engine = FakeEngine(depth=2, max_num_seqs=2)
    for stream in range(4):
        engine.add(prompt(20, stream), forever(8), stream=stream)
    engine.step()
    engine.fail_step()
    run_and_verify(engine)
    assert [engine.texts[s, 0, 0].finish_reason for s in range(4)] == ["error", "error", "length", "length"]


def test_answers_of_another_step_are_refused() -> None:
    scheduler = Scheduler(SchedulerConfig(pipeline_depth=2), KVCacheManager(16, 16), 256)
    scheduler.add(Request(0, 0, prompt(4), SamplingParams(), seed=0))
    first, second = scheduler.schedule(0.0), scheduler.schedule(0.0)
    assert first is not None
    assert second is not None
    assert scheduler.schedule(0.0) is None, "two steps in flight are the limit"
    for batch, output in (
        (second, StepOutput(second.step_id)),
        (first, StepOutput(second.step_id)),
        (first, StepOutput(first.step_id)),
    ):
        with pytest.raises(RuntimeError):
            scheduler.update(batch, output, 0.0)
    assert scheduler.num_in_flight == 2


def test_abort_of_the_unknown_changes_nothing() -> None:
    engine = FakeEngine()
    assert engine.scheduler.abort(99, now=0.0) == Changes()
    engine.add(prompt(4), forever(1))
    engine.run()
    assert engine.scheduler.abort(0, now=0.0) == Changes(), "it has ended"


def test_a_stop_string_is_counted_as_stop() -> None:
    engine = FakeEngine()
    engine.add(prompt(4), forever(9))
    engine.step()
    changes = engine.scheduler.abort(0, 0, 0, now=5.0, reason="stop")
    assert [s.finish_reason for s in changes.finished] == ["stop"]
    assert changes.finished[0].finished_s == 5.0


# -- what crosses


def test_batches_are_picklable_and_carry_only_deltas() -> None:
    engine = FakeEngine()
    engine.add(prompt(40), forever(30, n=2))
    run_and_verify(engine)
    for batch in engine.batches:
        assert pickle.loads(pickle.dumps(batch)) == batch
    quiet = [b for b in engine.batches if not (b.new_rows or b.new_blocks or b.block_copies or b.freed_rows)]
    assert len(quiet) > 20, "most steps change no table"


def test_step_stats_tell_what_the_step_computed_once() -> None:
    engine = FakeEngine(budget=64, chunk=64)
    engine.add(prompt(8), forever(10))
    engine.step()
    engine.step()
    engine.add(prompt(20, 5), forever(10))
    engine.step()
    stats = engine.scheduler.step_stats()
    assert (stats.num_scheduled_seqs, stats.num_prompt_tokens, stats.num_decode_tokens) == (2, 20, 1)
    assert (stats.num_running, stats.num_waiting) == (2, 0)
    assert engine.scheduler.step_stats().num_prompt_tokens == 0
    run_and_verify(engine)


def test_times_are_those_the_caller_named() -> None:
    engine = FakeEngine()
    engine.add(prompt(4), forever(3))
    run_and_verify(engine)
    stats = engine.finished[0]
    assert (stats.arrival_s, stats.scheduled_s, stats.first_token_s, stats.finished_s) == (0.0, 1.0, 1.0, 3.0)


# -- forgetting


def cached_tokens(engine: FakeEngine, stream: int) -> int | None:
    return engine.requests[stream, 0][0].num_cached_tokens


def test_after_a_reset_nothing_is_found_of_what_was_before() -> None:
    engine = FakeEngine(max_num_seqs=2)
    first = engine.add(prompt(40), forever(20))
    engine.step()
    running = engine.add(prompt(40), forever(20))
    waiting = engine.add(prompt(40), forever(2))
    engine.step()
    engine.scheduler.reset_prefix_cache()
    late = engine.add(prompt(40), forever(2))
    run_and_verify(engine)
    assert [cached_tokens(engine, stream) for stream in (first, running, waiting)] == [0, 32, 0]
    assert cached_tokens(engine, late) == 32, "what is computed after the reset is found"
    engine.scheduler.reset_prefix_cache()
    assert engine.scheduler.manager.stats().num_cached_blocks == 0


@pytest.mark.parametrize(("resets", "num_waiting", "num_cached"), [(False, 1, 96), (True, 0, 0)])
def test_a_reset_lets_go_who_waits_for_a_prefix_that_another_computes(
    resets: bool, num_waiting: int, num_cached: int
) -> None:
    engine = FakeEngine(budget=64)
    engine.add(prompt(100), forever(2))
    engine.step()
    stream = engine.add(prompt(100), forever(2))
    if resets:
        engine.scheduler.reset_prefix_cache()
    engine.step()
    assert len(engine.scheduler.queues.waiting) == num_waiting
    run_and_verify(engine)
    assert cached_tokens(engine, stream) == num_cached
