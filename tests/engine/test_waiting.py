"""Whose turn it is: clients in proportion to their weights, however many requests each has sent."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.sampling_params import SamplingParams
from engine.sequence import Request
from engine.terms import Terms
from engine.waiting import Waiting
from tests.engine.fake_engine import FakeEngine

LENGTH = 16  # output tokens of a request


def params(num_tokens: int = LENGTH) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True)


def engine(**options: int) -> FakeEngine:
    """Checks of invariants after every step are the random test's; 1,000 requests would take minutes."""
    made = FakeEngine(num_blocks=512, max_num_seqs=8, prefix_caching=False, **options)
    made.scheduler.check = lambda: None  # type: ignore[method-assign]
    return made


def ask(made: FakeEngine, client: str, count: int = 1, *, weight: float = 1.0, priority: int = 0) -> list[int]:
    terms = Terms(client, weight, priority=priority)
    return [made.add([1, 2, 3, len(made.requests) % 50], params(), terms=terms) for _ in range(count)]


def served(made: FakeEngine) -> Counter[str]:
    """Prompt and output tokens computed for each client so far."""
    counts: Counter[str] = Counter()
    for request, _ in made.requests.values():
        counts[request.terms.client] += request.sequences[0].high_water
    return counts


def steps_to_first_token(made: FakeEngine, stream: int) -> int:
    for count in range(1, 10_000):
        made.step()
        if made.texts[stream, 0, 0].token_ids:
            return count
    raise AssertionError("it starved")


@pytest.mark.parametrize(("neighbour", "least", "most"), [("greedy", 1900, 2300), ("modest", 1, LENGTH + 1)])
def test_a_thousand_requests_of_one_client_do_not_starve_one_of_another(neighbour: str, least: int, most: int) -> None:
    """8 rows, 1,000 requests of 16 tokens: in one line the last waits for all others, some 2,000 steps; with a key of
    its own it waits until one of those that run has ended."""
    made = engine()
    ask(made, "greedy", 1000)
    for _ in range(5):
        made.step()
    (stream,) = ask(made, neighbour)
    assert least <= steps_to_first_token(made, stream) <= most


def test_a_client_that_asks_one_by_one_is_served_at_once_beside_a_long_queue() -> None:
    made = engine()
    ask(made, "greedy", 1000)
    made.step()
    waits = []
    for _ in range(10):
        (stream,) = ask(made, "modest")
        waits.append(steps_to_first_token(made, stream))
        while made.texts[stream, 0, 0].finish_reason is None:
            made.step()
    assert max(waits) <= 2 * LENGTH + 2
    assert sum(waits) / len(waits) <= LENGTH + 1


@pytest.mark.parametrize("weight", [1.0, 3.0, 7.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_are_shared_by_weight_and_not_by_the_number_of_requests(weight: float, depth: int) -> None:
    made = engine(depth=depth)
    ask(made, "many", 900, weight=1.0)
    ask(made, "few", 300, weight=weight)
    for _ in range(500):
        made.step()
    counts = served(made)
    assert counts["few"] / counts["many"] == pytest.approx(weight, rel=0.1)


def test_what_a_client_left_unused_is_not_saved_up() -> None:
    """One client has the server to itself; when another comes both get the same from then on, and so the other way
    round."""
    made = engine()
    ask(made, "early", 400)
    for _ in range(300):
        made.step()
    before = served(made)
    ask(made, "late", 400)
    for _ in range(300):
        made.step()
    gained = served(made) - before
    assert gained["early"] / gained["late"] == pytest.approx(1, rel=0.15)


def test_a_client_alone_is_served_in_order_of_urgency_and_arrival() -> None:
    made = FakeEngine(max_num_seqs=1)
    for stream, priority in enumerate([0, 5, 0, -1, 5, -1]):
        made.add([stream], params(2), stream=stream, terms=Terms("one", priority=priority))
    order = [sequence.request.stream_id for sequence in made.scheduler.queues.waiting]
    assert order == [3, 5, 0, 2, 1, 4]
    made.run()
    made.verify()
    started = sorted(made.requests, key=lambda key: made.requests[key][0].sequences[0].scheduled_s or 0.0)
    assert [stream for stream, _ in started] == order


def test_urgency_moves_nobody_ahead_of_another_client() -> None:
    made = engine()
    ask(made, "pushy", 100, priority=-1000)
    ask(made, "quiet", 100, priority=1000)
    for _ in range(200):
        made.step()
    counts = served(made)
    assert counts["pushy"] / counts["quiet"] == pytest.approx(1, rel=0.15)


def test_cached_tokens_and_computing_again_are_free() -> None:
    made = FakeEngine(max_num_seqs=4, num_blocks=64)
    stem = [i % 50 for i in range(48)]
    made.add(stem, params(1), terms=Terms("a"))
    made.run()
    made.add([*stem, 9], params(6), terms=Terms("a"))
    made.add([7, 7, 7], params(6), terms=Terms("b"))
    made.step()
    times = {client: line.time for client, line in made.scheduler.queues.waiting._lines.items()}
    assert times == {"a": 1.0, "b": 3.0}, "what the cache had is not charged"
    made.step()
    made.scheduler.preempt_all()
    made.step()
    made.scheduler.queues.waiting.settle(made.scheduler.queues.running)
    times = {client: line.time for client, line in made.scheduler.queues.waiting._lines.items()}
    assert times == {"a": 3.0, "b": 5.0}, "two tokens each: what was computed again is not charged"
    made.run()
    made.verify()


def test_nothing_is_remembered_of_clients_when_all_is_done() -> None:
    made = FakeEngine()
    for client in "abcde":
        made.add([1, 2], SamplingParams(max_tokens=3, n=2), terms=Terms(client))
    made.run()
    waiting = made.scheduler.queues.waiting
    assert not waiting
    assert not waiting._lines
    assert not waiting._left


def test_passed_over_sequences_keep_their_places() -> None:
    waiting = Waiting()
    requests = [Request(i, 0, [1], params(), seed=0, terms=Terms(name)) for i, name in enumerate("aabb")]
    for request in requests:
        waiting.enter(request, [])
        waiting.add(request.sequences[0])
    before = [sequence.request.stream_id for sequence in waiting]
    waiting.pass_over()
    waiting.pass_over()
    waiting.pass_over()
    assert len(waiting) == 1
    waiting.restore()
    assert [sequence.request.stream_id for sequence in waiting] == before == [0, 1, 2, 3]
