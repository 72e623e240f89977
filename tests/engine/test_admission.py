"""The bound on what waits: whole, shared, and with a word on when to come back."""

from __future__ import annotations

import random

import pytest

from engine.admission import LONGEST_RETRY_S, Admission
from engine.config import SchedulerConfig
from engine.outputs import QueueFull
from engine.sampling_params import InvalidParameter
from engine.terms import NO_TERMS, Terms

LIMITS = SchedulerConfig(max_num_seqs=10, max_waiting_requests=90, max_waiting_tokens=1000)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def admission(clock: Clock | None = None) -> Admission:
    return Admission(LIMITS, clock or Clock())


def fill(door: Admission, terms: Terms) -> int:
    """How many requests of one token go in."""
    for count in range(10_000):
        try:
            door.enter(1, 1, terms)
        except QueueFull:
            return count
    raise AssertionError("there is no bound")


def test_the_bound_is_on_sequences_and_on_tokens() -> None:
    door = admission()
    assert fill(door, NO_TERMS) == 100
    door = admission()
    door.enter(1, 999, NO_TERMS)
    door.enter(1, 1, NO_TERMS)
    with pytest.raises(QueueFull):
        door.enter(1, 1, NO_TERMS)
    door.start(1, 999, NO_TERMS)
    door.enter(1, 999, NO_TERMS)


@pytest.mark.parametrize(("num_sequences", "num_tokens"), [(101, 1), (1, 1001)])
def test_what_could_never_enter_is_the_requests_fault(num_sequences: int, num_tokens: int) -> None:
    with pytest.raises(InvalidParameter):
        admission().enter(num_sequences, num_tokens, NO_TERMS)


def test_a_full_queue_of_one_client_leaves_the_others_their_parts() -> None:
    door = admission()
    greedy, modest, third = Terms("greedy", reserved=0.5), Terms("modest", reserved=0.3), Terms("third", reserved=0.2)
    assert fill(door, greedy) == 100
    assert fill(door, modest) == 30
    assert fill(door, third) == 20
    assert fill(door, greedy) == 0, "its own part is used up"
    assert fill(door, Terms("unknown")) == 0
    for _ in range(50):
        door.start(1, 1, greedy)
    assert fill(door, greedy) == 0, "150 were there, 100 are"
    door.start(1, 1, greedy)
    assert fill(door, greedy) == 1


def test_the_first_answer_knows_no_rate_and_says_the_longest() -> None:
    door = admission()
    fill(door, NO_TERMS)
    with pytest.raises(QueueFull) as caught:
        door.enter(1, 1, NO_TERMS)
    assert caught.value.retry_after_s == LONGEST_RETRY_S


@pytest.mark.parametrize(("per_second", "wanted_s"), [(1000.0, 1), (12.5, 1), (5.0, 3), (0.5, 25), (0.1, 60)])
def test_retry_after_is_the_time_an_eighth_of_the_queue_takes(per_second: float, wanted_s: int) -> None:
    clock = Clock()
    door = admission(clock)
    fill(door, NO_TERMS)
    for _ in range(200):  # a steady queue
        clock.now += 1 / per_second
        door.start(1, 1, NO_TERMS)
        door.enter(1, 1, NO_TERMS)
    assert door.retry_after_s() == pytest.approx(wanted_s, abs=1)


def test_idle_time_does_not_slow_the_rate_down() -> None:
    clock = Clock()
    door = admission(clock)
    for _ in range(20):
        door.enter(1, 1, NO_TERMS)
        clock.now += 0.1
        door.start(1, 1, NO_TERMS)
        clock.now += 100
    fill(door, NO_TERMS)
    assert door.retry_after_s() == 2, "an eighth of 100 at 10 per second"


def test_nothing_is_left_behind() -> None:
    rng = random.Random(3)
    door, inside = admission(), []
    for _ in range(3000):
        if inside and rng.random() < 0.5:
            door.start(*inside.pop(rng.randrange(len(inside))))
        else:
            item = rng.randint(1, 5), rng.randint(1, 60), Terms(rng.choice("abc"), reserved=0.3)
            try:
                door.enter(*item)
                inside.append(item)
            except QueueFull:
                pass
        assert door.num_sequences == sum(item[0] for item in inside) <= 200
        assert door.num_tokens == sum(item[1] for item in inside) <= 2000
    for item in inside:
        door.start(*item)
    assert (door.num_sequences, door.num_tokens, door._held) == (0, 0, {})
