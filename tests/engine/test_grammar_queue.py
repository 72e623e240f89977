"""The workers that try grammars."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.grammar_queue import Workers
from engine.outputs import QueueFull


async def test_where_no_thread_can_be_started_the_turn_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers("test", 1)

    def no_thread(self: ThreadPoolExecutor) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(ThreadPoolExecutor, "_adjust_thread_count", no_thread)
        for _ in range(3):
            with pytest.raises(QueueFull, match="No thread"):
                await asyncio.wait_for(workers.run(0, "somebody", lambda: 1), 5)
    assert await asyncio.wait_for(workers.run(0, "somebody", lambda: 2), 5) == 2
    workers.close()
