"""Work in threads by turns: who comes with one piece is not held up by who has a thousand."""

from __future__ import annotations

import asyncio
import threading

import pytest

from server.turns import Turns
from tests.server.harness import eventually


class Work:
    """Pieces of work that end when they are told to, and the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._may_end = threading.Semaphore(0)

    def __call__(self, name: str) -> str:
        self.begun.append(name)
        self._may_end.acquire()
        return name

    def end(self, count: int) -> None:
        self._may_end.release(count)


async def test_one_clients_many_do_not_hold_up_anothers_one() -> None:
    turns, work = Turns(2), Work()
    many = [asyncio.create_task(turns.run("many", work, f"many {k}")) for k in range(1000)]
    await eventually(lambda: work.begun)
    one = asyncio.create_task(turns.run("one", work, "one"))
    await eventually(lambda: len(work.begun) == 2)
    assert work.begun == ["many 0", "one"], "a thread was left for it"
    others = [asyncio.create_task(turns.run(name, work, name)) for name in ("a", "b", "c")]
    await asyncio.sleep(0)
    work.end(1004)
    assert await asyncio.gather(one, *others) == ["one", "a", "b", "c"]
    assert max(work.begun.index(name) for name in "abc") < 20
    assert await asyncio.gather(*many) == [f"many {k}" for k in range(1000)]
    assert (turns._num_free, turns._busy, turns._lines) == (2, {}, {})


async def test_a_single_thread_goes_round() -> None:
    turns, work = Turns(1), Work()
    tasks = [asyncio.create_task(turns.run(name[0], work, name)) for name in ("a1", "a2", "a3", "b1", "b2", "c1")]
    work.end(6)
    await asyncio.gather(*tasks)
    assert work.begun == ["a1", "a2", "b1", "c1", "a3", "b2"]


async def test_who_is_cancelled_keeps_its_turn_as_long_as_its_thread() -> None:
    turns, work = Turns(1), Work()
    first, second = (asyncio.create_task(turns.run(name, work, name)) for name in ("first", "second"))
    await eventually(lambda: work.begun)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0.05)
    assert work.begun == ["first"], "its thread is not free yet"
    work.end(2)
    assert await second == "second"
    assert (turns._num_free, turns._busy, turns._lines) == (1, {}, {})


async def test_who_leaves_the_line_or_fails_gives_its_turn_on() -> None:
    turns, work = Turns(1), Work()

    def fails() -> None:
        raise ZeroDivisionError

    first, left, last = (asyncio.create_task(turns.run(name, work, name)) for name in ("first", "left", "last"))
    await eventually(lambda: work.begun == ["first"])
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    work.end(2)
    assert await asyncio.gather(first, last) == ["first", "last"]
    with pytest.raises(ZeroDivisionError):
        await turns.run("x", fails)
    assert (turns._num_free, turns._busy, turns._lines) == (1, {}, {})
