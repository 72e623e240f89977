"""Whose turn it is: cheap work first, but not for ever, and one client after the other."""

from __future__ import annotations

import asyncio
import random

import pytest

from engine.grammar_turns import PATIENCE, Turns


class Workers:
    """Takes turns and tells in which order they came; each is given back when asked."""

    def __init__(self, most: tuple[int, ...]) -> None:
        self.turns = Turns(most)
        self.order: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, name: str, level: int = 0, client: str = "") -> None:
        async def taken() -> None:
            await self.turns.take(level, client)
            self.order.append(name)

        self.tasks[name] = asyncio.create_task(taken())
        await self.settle()

    @staticmethod
    async def settle() -> None:
        for _ in range(3):
            await asyncio.sleep(0)

    async def give(self, level: int = 0) -> None:
        self.turns.give(level)
        await self.settle()


async def test_clients_take_turns() -> None:
    workers = Workers((1,))
    for i in range(3):
        await workers.ask(f"a{i}", client="a")
    await workers.ask("b0", client="b")
    await workers.ask("b1", client="b")
    await workers.ask("c0", client="c")
    for _ in range(5):
        await workers.give()
    assert workers.order == ["a0", "a1", "b0", "c0", "a2", "b1"]


async def test_what_is_cheap_goes_first_and_the_rest_is_not_forgotten() -> None:
    workers = Workers((1, 1))
    await workers.ask("first")
    await workers.ask("slow", level=1)
    for i in range(2 * PATIENCE):
        await workers.ask(f"quick{i}")
    for _ in range(PATIENCE):
        await workers.give()
    assert "slow" not in workers.order
    await workers.give()
    assert workers.order[-1] == "slow"
    await workers.give(1)
    assert workers.order[-1] == f"quick{PATIENCE}"


async def test_one_worker_is_kept_for_what_is_new() -> None:
    workers = Workers((2, 1))
    await workers.ask("slow", level=1)
    await workers.ask("slower", level=1)
    await workers.ask("quick")
    assert workers.order == ["slow", "quick"]
    await workers.give()
    assert workers.order == ["slow", "quick"]
    await workers.give(1)
    assert workers.order == ["slow", "quick", "slower"]


async def test_who_leaves_takes_no_turn() -> None:
    workers = Workers((1,))
    for name in ("here", "gone", "next"):
        await workers.ask(name)
    workers.tasks["gone"].cancel()
    await workers.settle()
    await workers.give()
    assert workers.order == ["here", "next"]


async def test_who_is_cancelled_with_a_turn_in_hand_gives_it_back() -> None:
    workers = Workers((1,))
    await workers.ask("here")
    await workers.ask("gone")
    workers.turns.give(0)
    workers.tasks["gone"].cancel()  # before it could run
    await workers.ask("next")
    assert workers.order == ["here", "next"]


@pytest.mark.parametrize("seed", range(20))
async def test_no_more_work_than_workers_and_nobody_is_left(seed: int) -> None:
    lots = random.Random(seed)
    most = (3, 2, 1)
    turns, busy, done = Turns(most), [0, 0, 0], []

    async def work(name: int) -> None:
        level = lots.randrange(3)
        await asyncio.sleep(0.001 * lots.randrange(5))
        await turns.take(level, str(lots.randrange(3)))
        busy[level] += 1
        assert busy[level] <= most[level]
        assert sum(busy) <= most[0]
        try:
            await asyncio.sleep(0.001 * lots.randrange(3))
        finally:
            busy[level] -= 1
            turns.give(level)
        done.append(name)

    tasks = [asyncio.create_task(work(name)) for name in range(40)]
    left = lots.sample(range(40), 10)
    for name in left:
        await asyncio.sleep(0)
        tasks[name].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert set(done) >= set(range(40)) - set(left)
    await asyncio.wait_for(turns.take(0, ""), 5)
