"""The bounded store of responses."""

from __future__ import annotations

import random
from typing import Any

from server.response_store import ENTRY_BYTES, ITEM_BYTES, Kept, ResponseStore, StoredResponse


def response(id: str, text: str = "x") -> dict[str, Any]:
    return {"id": id, "output": [{"id": f"out_{id}", "text": text}]}


def given(id: str, text: str = "y") -> Kept:
    return Kept.of([{"id": f"in_{id}", "text": text}])


def chain(store: ResponseStore, length: int, text: str = "x") -> StoredResponse:
    previous = None
    for k in range(length):
        assert store.put(response(f"r{k}", text), given(f"r{k}"), previous)
        previous = store.get(f"r{k}")
    assert previous is not None
    return previous


def test_a_conversation_is_its_turns() -> None:
    last = chain(ResponseStore(10, 1 << 20), 3)
    assert [item["id"] for item in last.history()] == ["in_r0", "out_r0", "in_r1", "out_r1", "in_r2", "out_r2"]
    assert [item["id"] for item in last.input_items()] == ["in_r0", "out_r0", "in_r1", "out_r1", "in_r2"]


def test_the_least_recently_used_goes_first() -> None:
    store = ResponseStore(2, 1 << 20)
    for id in ("a", "b"):
        store.put(response(id), given(id))
    assert store.get("a") is not None
    store.put(response("c"), given("c"))
    assert store.get("b") is None
    assert store.get("a") is not None
    assert len(store) == 2


def test_a_chain_outlives_its_beginning() -> None:
    store = ResponseStore(1, 1 << 20)
    last = chain(store, 5)
    assert store.get("r3") is None
    assert len(last.history()) == 10
    assert set(store.find_items(["out_r0", "in_r4", "nothing"])) == {"out_r0", "in_r4"}


def test_shared_turns_are_counted_once() -> None:
    long = ResponseStore(1000, 1 << 24)
    chain(long, 100, "t" * 1000)
    # each body holds its output once, each turn once more; nothing is counted per later response
    assert long.num_bytes < 100 * (2 * 1100 + ENTRY_BYTES + 3 * ITEM_BYTES)


def test_bytes_are_bounded_and_given_back() -> None:
    rng = random.Random(3)
    store = ResponseStore(50, 200_000)
    ids: list[str] = []
    for k in range(600):
        id = f"r{k}"
        previous = store.get(rng.choice(ids)) if ids and rng.random() < 0.6 else None
        assert store.put(response(id, "x" * rng.randrange(8000)), given(id), previous) in (True, False)
        ids.append(id)
        if rng.random() < 0.2:
            store.delete(rng.choice(ids))
        assert store.num_bytes <= 200_000
        assert len(store) <= 50
    for id in ids:
        store.delete(id)
    assert (store.num_bytes, len(store)) == (0, 0)
    assert store.find_items([f"out_{id}" for id in ids]) == {}


def test_one_that_is_too_large_leaves_the_others() -> None:
    store = ResponseStore(10, 10_000)
    assert store.put(response("a"), given("a"))
    assert not store.put(response("b", "x" * 20_000), given("b"))
    assert store.get("a") is not None
    assert store.get("b") is None


def test_a_store_of_nothing() -> None:
    store = ResponseStore(0, 1 << 20)
    assert not store.put(response("a"), given("a"))
    assert store.get("a") is None
    assert not store.delete("a")


def test_delete() -> None:
    store = ResponseStore(10, 1 << 20)
    chain(store, 2)
    assert store.delete("r0")
    assert not store.delete("r0")
    assert store.get("r0") is None
    assert set(store.find_items(["out_r0"])) == {"out_r0"}  # the second response still needs it
    assert store.delete("r1")
    assert store.find_items(["out_r0"]) == {}
