"""A device that is lost while it serves: the real server around the real engine, whose runner is a fake."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig, SchedulerConfig
from server import lifecycle
from server.lifecycle import Lifecycle
from server.settings import Settings
from tests.engine.test_async_engine import Runner, parts
from tests.server.process import free_port
from tests.server.stub_engine import byte_tokenizer

LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


class Lost(Runner):
    """From the step `after` on, the device is lost; late: the result says so, not the launch."""

    after = 20
    late = False

    def launch(self, batch: Any) -> Any:
        time.sleep(0.05)  # both requests are there before the end
        self.after -= 1
        if self.after > 0:
            return super().launch(batch)
        if not self.late:
            raise LOST
        super().launch(batch)
        return SimpleNamespace(result=self._fail)

    def _fail(self) -> Any:
        raise LOST


@pytest.mark.parametrize("late", [False, True], ids=["launch", "result"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_clients_hear_of_it_and_the_process_fails(depth: int, late: bool) -> None:
    def load(config: EngineConfig) -> Any:
        made = parts(config)
        made.runner, made.tokenizer = Lost(16), byte_tokenizer()
        made.runner.late = late
        made.info = replace(made.info, vocab_size=257)
        return made

    settings = Settings(port=free_port())
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=depth)
    engine = AsyncEngine(EngineConfig(scheduler=scheduler), load)
    serving = asyncio.create_task(Lifecycle(settings, engine, lifecycle.bind(settings)).run())
    url = f"http://127.0.0.1:{settings.port}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as client:
        while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110  # nothing tells us
            await asyncio.sleep(0.02)
        body = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True}
        streamed, plain = await asyncio.gather(
            client.post("/v1/completions", json=body | {"stream": True}), client.post("/v1/completions", json=body)
        )
        assert '"error"' in streamed.text.split("data: ")[-2]
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert plain.status_code == 503, "no fault of the request: another server may do it"
        assert "CUDA" not in plain.text + streamed.text, "inner detail stays inside"
    assert await asyncio.wait_for(serving, 30) == 1
