"""A real engine in the test's process: the same loop as the server's, driven synchronously."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from engine.assembly import EngineParts, load_engine
from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.outputs import Delivery, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.stats import RequestStats, StepStats


@dataclass
class Generated:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    top_logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)  # from the second prompt token on
    prompt_top: list[TokenLogprobs] = field(default_factory=list)
    prompt_ranks: list[int] = field(default_factory=list)


class Harness:
    """with Harness(config) as engine: engine.run([[1, 2, 3]], params) -> {(prompt, choice): Generated}"""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], EngineParts] = load_engine) -> None:
        self.loop = asyncio.new_event_loop()
        self.engine = AsyncEngine(config, load)
        self.steps: list[StepStats] = []
        self.finished: list[RequestStats] = []
        self.engine.add_listener(self._listen)
        self.loop.run_until_complete(self.engine.start())

    def _listen(self, delivery: Delivery) -> None:
        if delivery.step is not None:
            self.steps.append(delivery.step)
        self.finished += delivery.finished

    def run(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, **kwargs: Any
    ) -> dict[tuple[int, int], Generated]:
        return self.loop.run_until_complete(self.collect(prompts, params, **kwargs))

    def run_each(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **kwargs: Any
    ) -> list[dict[tuple[int, int], Generated]]:
        """All prompts at once, each as a request of its own."""

        async def together() -> list[dict[tuple[int, int], Generated]]:
            jobs = (self.collect([p], q, **kwargs) for p, q in zip(prompts, params, strict=True))
            return await asyncio.gather(*jobs)

        return self.loop.run_until_complete(together())

    async def collect(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, **kwargs: Any
    ) -> dict[tuple[int, int], Generated]:
        result: dict[tuple[int, int], Generated] = {}
        stream = self.engine.generate(prompts, params, **kwargs)
        try:
            async for outputs in stream:
                for output in outputs:
                    got = result.setdefault((output.prompt_index, output.choice_index), Generated())
                    got.token_ids += output.token_ids
                    got.logprobs += output.logprobs
                    got.finish_reason = output.finish_reason
                    got.num_cached_tokens = max(got.num_cached_tokens, output.num_cached_tokens)
                    got.error = output.error
                    got.top_logprobs += output.top_logprobs or ()
                    for chunk in output.prompt_logprobs:
                        got.prompt_logprobs += chunk.logprobs
                        got.prompt_ranks += chunk.ranks
                        got.prompt_top += [chunk.top(i, chunk.num_top) for i in range(len(chunk.logprobs))]
        finally:
            stream.close()
        return result

    def settle(self) -> None:
        """Let the deliveries that are on their way arrive."""
        self.loop.run_until_complete(asyncio.sleep(0.05))

    def close(self) -> None:
        self.loop.run_until_complete(self.engine.stop())
        self.loop.close()

    def __enter__(self) -> Harness:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()
