"""The bounded store of responses."""

from __future__ import annotations

import random
import tracemalloc
from typing import Any

from server.event_log import EventLog
from server.response_store import ENTRY_BYTES, ITEM_BYTES, TURN_BYTES, Kept, ResponseStore, Shelf, StoredResponse


def response(id: str, text: str = "x") -> dict[str, Any]:
    return {"id": id, "output": [{"id": f"out_{id}", "text": text}]}


def given(id: str, text: str = "y") -> Kept:
    return Kept.of([{"id": f"in_{id}", "text": text}])


def chain(store: Shelf, length: int, text: str = "x") -> StoredResponse:
    previous = None
    for k in range(length):
        assert store.put(response(f"r{k}", text), given(f"r{k}"), previous)
        previous = store.get(f"r{k}")
    assert previous is not None
    return previous


def test_a_conversation_is_its_turns() -> None:
    last = chain(ResponseStore(10, 1 << 20).of("me"), 3)
    assert [item.id for item in last.history()] == ["in_r0", "out_r0", "in_r1", "out_r1", "in_r2", "out_r2"]
    assert [item.id for item in last.input_items()] == ["in_r0", "out_r0", "in_r1", "out_r1", "in_r2"]


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(2, 1 << 20)
    shelf = store.of("me")
    for id in ("a", "b"):
        shelf.put(response(id), given(id))
    assert shelf.get("a") is not None
    shelf.put(response("c"), given("c"))
    assert shelf.get("b") is None
    assert shelf.get("a") is not None
    assert len(store) == 2


def test_a_chain_outlives_its_beginning() -> None:
    store = ResponseStore(1, 1 << 20).of("me")
    last = chain(store, 5)
    assert store.get("r3") is None
    assert len(last.history()) == 10
    assert set(store.find_items(["out_r0", "in_r4", "nothing"])) == {"out_r0", "in_r4"}


def test_shared_turns_are_counted_once() -> None:
    long = ResponseStore(1000, 1 << 24)
    chain(long.of("me"), 100, "t" * 1000)
    # each body holds its output once, each turn once more; nothing is counted per later response
    assert long.num_bytes < 100 * (2 * 1100 + ENTRY_BYTES + TURN_BYTES + 3 * ITEM_BYTES)


def test_bytes_are_bounded_and_given_back() -> None:
    rng = random.Random(3)
    store = ResponseStore(50, 200_000)
    shelf = store.of("me")
    ids: list[str] = []
    for k in range(600):
        id = f"r{k}"
        previous = shelf.get(rng.choice(ids)) if ids and rng.random() < 0.6 else None
        assert shelf.put(response(id, "x" * rng.randrange(8000)), given(id), previous) in (True, False)
        ids.append(id)
        if rng.random() < 0.2:
            shelf.delete(rng.choice(ids))
        assert store.num_bytes <= 200_000
        assert len(store) <= 50
    for id in ids:
        shelf.delete(id)
    assert (store.num_bytes, len(store)) == (0, 0)
    assert shelf.find_items([f"out_{id}" for id in ids]) == {}


def test_one_that_is_too_large_leaves_the_others() -> None:
    store = ResponseStore(10, 10_000).of("me")
    assert store.put(response("a"), given("a"))
    assert not store.put(response("b", "x" * 20_000), given("b"))
    assert store.get("a") is not None
    assert store.get("b") is None


def test_a_store_of_nothing() -> None:
    store = ResponseStore(0, 1 << 20).of("me")
    assert not store.put(response("a"), given("a"))
    assert store.get("a") is None
    assert not store.delete("a")


def test_many_of_one_owner_push_out_none_of_another() -> None:
    for store in (ResponseStore(20, 1 << 20), ResponseStore(1000, 40_000)):
        few, many = store.of("few"), store.of("many")
        chain(few, 3)
        for k in range(200):
            assert many.put(response(f"m{k}"), given(f"m{k}"))
            assert many.get(f"m{k}") is not None, "the newest is there, whoever holds the most"
        assert few.get("r0") is not None
        assert few.get("r2") is not None
        assert many.get("m0") is None
        assert few.put(response("large", "x" * 12_000), given("large"))
        assert few.get("large") is not None
        for k in range(200):
            many.delete(f"m{k}")
        for id in ("r0", "r1", "r2", "large"):
            few.delete(id)
        assert (store.num_bytes, len(store), store._bytes_of) == (0, 0, {})


def test_one_of_several_owners_reserves_no_more_than_half() -> None:
    store = ResponseStore(10, 1000)
    assert store.reserve(500, "a")
    assert not store.reserve(1, "a")
    assert store.reserve(500, "b")
    store.release(500, "a")
    assert store.reserve(500, "a")
    alone = ResponseStore(10, 1000)  # without keys
    assert alone.reserve(1000)


def test_delete() -> None:
    store = ResponseStore(10, 1 << 20).of("me")
    chain(store, 2)
    assert store.delete("r0")
    assert not store.delete("r0")
    assert store.get("r0") is None
    assert set(store.find_items(["out_r0"])) == {"out_r0"}  # the second response still needs it
    assert store.delete("r1")
    assert store.find_items(["out_r0"]) == {}


def test_each_owner_has_a_store_of_its_own() -> None:
    store = ResponseStore(10, 1 << 20)
    mine, yours = store.of("me"), store.of("you")
    chain(mine, 2)
    assert yours.get("r0") is None
    assert not yours.delete("r0")
    assert yours.find_items(["in_r0", "out_r0", "out_r1"]) == {}
    assert store.of("").find_items(["out_r0"]) == {}
    assert mine.get("r0") is not None
    assert set(mine.find_items(["in_r0", "out_r1"])) == {"in_r0", "out_r1"}
    assert len(store) == 2  # the bounds are everybody's


def test_ids_that_clients_chose_are_no_way_to_an_item() -> None:
    shelf = ResponseStore(10, 1 << 20).of("me")
    items = [{"id": "msg_1", "text": "theirs"}, {"id": "msg_2", "text": "ours"}]
    assert shelf.put(response("r"), Kept.of(items, chosen={"msg_1"}))
    assert list(shelf.find_items(["msg_1", "msg_2"])) == ["msg_2"]
    kept = shelf.get("r")
    assert kept is not None
    assert [item.read()["text"] for item in kept.input_items()] == ["theirs", "ours"]


def test_an_item_that_is_kept_twice_is_found_until_both_are_gone() -> None:
    shelf = ResponseStore(10, 1 << 20).of("me")
    twice = [{"id": "msg_1", "text": "x"}] * 3
    assert shelf.put(response("a"), Kept.of(twice))
    assert shelf.put(response("b"), Kept.of(twice))
    assert shelf.delete("b")
    assert set(shelf.find_items(["msg_1"])) == {"msg_1"}
    assert shelf.delete("a")
    assert shelf.find_items(["msg_1"]) == {}


def test_a_conversation_has_no_logprobs() -> None:
    shelf = ResponseStore(10, 1 << 20).of("me")
    part = {"type": "output_text", "text": "x", "logprobs": [{"token": "x"}]}
    assert shelf.put({"id": "r", "output": [{"id": "out", "content": [part]}]}, Kept())
    kept = shelf.get("r")
    assert kept is not None
    assert kept.history()[0].read() == {"id": "out", "content": [part | {"logprobs": []}]}
    assert b'"token":"x"' in kept.body


def test_a_long_conversation_costs_what_it_says() -> None:
    store = ResponseStore(3000, 1 << 26)
    shelf = store.of("me")
    previous = None
    tracemalloc.start()
    try:
        for k in range(2000):
            assert shelf.put(response(f"r{k}"), Kept(), previous)
            previous = shelf.get(f"r{k}")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < store.num_bytes  # with a list of its turns, each response would cost more than the one before
    assert previous is not None
    assert len(previous.history()) == 2000
    for k in range(2000):
        assert shelf.delete(f"r{k}")
    assert store.num_bytes == 0
    assert shelf.put(response("again"), Kept(), previous)  # what a request in flight still holds comes back whole
    assert set(shelf.find_items(["out_r0", "out_again"])) == {"out_r0", "out_again"}
    assert shelf.delete("again")
    assert store.num_bytes == 0


def log_of(size: int) -> EventLog:
    log = EventLog()
    log.append(b"x" * size + b"\n\n")
    log.publish(ended=True)
    return log


def test_events_count_and_go_with_their_response() -> None:
    store = ResponseStore(10, 20_000)
    shelf = store.of("me")
    logs = [log_of(6000) for _ in range(4)]
    for k, log in enumerate(logs):
        assert shelf.put(response(f"r{k}"), given(f"r{k}"), events=log)
        assert 6000 < store.num_bytes <= 20_000
    assert [shelf.get(f"r{k}") is not None for k in range(4)] == [False, False, True, True]
    assert [log.dropped for log in logs] == [True, True, False, False]
    assert shelf.delete("r2")
    assert logs[2].dropped
    assert not shelf.put(response("large"), given("large"), events=log_of(20_000))
    assert not logs[3].dropped


def test_what_is_reserved_is_taken_from_the_others() -> None:
    store = ResponseStore(10, 10_000)
    shelf = store.of("me")
    for id in ("a", "b"):
        assert shelf.put(response(id, "x" * 200), given(id))
    held = store.num_bytes
    assert store.reserve(10_000 - held)
    assert len(store) == 2
    assert store.reserve(1)
    assert shelf.get("a") is None
    assert shelf.get("b") is not None
    assert store.reserve(held - 1)
    assert (len(store), store.num_bytes) == (0, 0)
    assert not store.reserve(1)
    assert not shelf.put(response("c"), given("c"))
    store.release(10_000)
    assert shelf.put(response("c"), given("c"))


def test_what_may_be_cancelled_again() -> None:
    shelf = ResponseStore(10, 1 << 20).of("me")
    for id, fields in (("a", {"background": True}), ("b", {"status": "cancelled"}), ("c", {"status": "completed"})):
        shelf.put(response(id) | fields, given(id))
    kept = [shelf.get(id) for id in "abc"]
    assert [entry.may_cancel for entry in kept if entry is not None] == [True, True, False]
