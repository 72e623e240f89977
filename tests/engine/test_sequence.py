from __future__ import annotations

from engine.sampling.philox import seed_key
from engine.sampling_params import SamplingParams
from engine.sequence import Request, Sequence


def make(max_output: int = 10, **params: object) -> Sequence:
    request = Request(1, 2, [5, 6, 7], SamplingParams(**params), seed=3, eos_token_ids=(0,))
    sequence = request.sequences[0]
    sequence.max_output_tokens = max_output
    return sequence


def test_a_request_owns_n_sequences_with_their_own_randomness() -> None:
    request = Request(1, 2, (5, 6), SamplingParams(n=3), seed=-9)
    assert [s.choice_index for s in request.sequences] == [0, 1, 2]
    assert [s.seed_key for s in request.sequences] == [seed_key(-9, 2, c) for c in range(3)]
    request.sequences[0].append(1)
    assert request.sequences[1].token_ids == [5, 6], "tokens are not shared"


def test_position_runs_after_the_tokens_through_steps_in_flight() -> None:
    sequence = make()
    assert not sequence.schedule(2)
    assert (sequence.position, sequence.num_uncomputed_tokens, sequence.num_tokens) == (2, 1, 3)
    assert sequence.schedule(1), "the last known token samples"
    assert (sequence.num_tokens, sequence.num_pending_tokens, sequence.num_uncomputed_tokens) == (4, 1, 1)
    assert sequence.schedule(1), "and the token it will sample can be scheduled before it is known"
    assert (sequence.position, sequence.num_tokens, sequence.num_steps_in_flight) == (4, 5, 3)
    sequence.retire(2, False)
    assert (sequence.num_computed_tokens, sequence.num_scheduled_tokens) == (2, 2)
    sequence.retire(3, True)
    sequence.append(9)
    assert (sequence.num_computed_tokens, sequence.num_scheduled_tokens, sequence.num_tokens) == (3, 1, 5)
    assert (sequence.position, sequence.num_output_tokens, sequence.num_steps_in_flight) == (4, 1, 1)


def test_it_wants_no_tokens_past_its_limit_even_if_unknown() -> None:
    sequence = make(max_output=2)
    sequence.schedule(3)
    assert sequence.wants_tokens
    sequence.schedule(1)
    assert not sequence.wants_tokens


def test_ends() -> None:
    assert make().append(0) == "stop"
    assert make().append(1) is None
    assert make(max_output=1).append(1) == "length"
    assert make(max_output=1).append(0) == "stop", "both at once: stop"
    assert make(ignore_eos=True).append(0) is None
    assert make(ignore_eos=True, stop_token_ids=(4,)).append(4) == "stop"


def test_neither_end_nor_stop_token_ends_it_before_min_tokens() -> None:
    sequence = make(min_tokens=3, stop_token_ids=(4,))
    assert [sequence.append(t) for t in (0, 4, 4)] == [None, None, "stop"]


def test_stats_tell_the_life() -> None:
    sequence = make()
    sequence.request.num_cached_tokens = 2
    sequence.scheduled_s, sequence.first_token_s, sequence.num_preemptions = 1.0, 2.0, 4
    sequence.append(3)
    stats = sequence.stats("length", 5.0)
    assert (stats.finish_reason, stats.num_prompt_tokens, stats.num_output_tokens) == ("length", 3, 1)
    assert (stats.num_cached_tokens, stats.num_preemptions) == (2, 4)
    assert (stats.arrival_s, stats.scheduled_s, stats.first_token_s, stats.finished_s) == (0.0, 1.0, 2.0, 5.0)
