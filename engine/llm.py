"""`LLM`: the engine inside your own Python process, synchronous; the same loop that serves HTTP."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from threading import Thread
from types import TracebackType
from typing import TypeVar

from tqdm import tqdm

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.sampling_params import SamplingParams
from engine.text import Assembler

Result = TypeVar("Result")


@dataclass(slots=True)
class Completion:
    """One generated sequence. token_ids end with the stop token, if one ended it; text does not hold it.

    logprobs: with SamplingParams.logprobs, of the chosen tokens, natural logarithms; SamplingParams.logprobs_mode says
        of which distribution.
    prompt_logprobs: with SamplingParams.prompt_logprobs, of the prompt's tokens from the second on."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[float] = field(default_factory=list)


class LLM:
    """LLM("folder or .gguf", dtype="float32").generate(["Once upon a time"], SamplingParams(max_tokens=32)).

    model None is the demo model; settings are the fields of engine/config.py. Raises StartError if it cannot start,
    TypeError for a setting that does not exist."""

    def __init__(self, model: str | None = None, **settings: object) -> None:
        config = EngineConfig.of(model=model, **settings)
        # nobody else is waiting: the queue is bounded by the caller's own list
        unbounded = replace(config.scheduler, max_waiting_requests=2**31, max_waiting_tokens=2**62)
        self._event_loop = asyncio.new_event_loop()  # in a thread of its own: the caller may be inside another loop
        thread = Thread(target=self._event_loop.run_forever, name="pagemill-llm", daemon=True)
        thread.start()
        self._engine = AsyncEngine(replace(config, scheduler=unbounded))
        # also when the object is forgotten and at the interpreter's end: a compute thread must not outlive it
        self._close = weakref.finalize(self, _shut_down, self._engine, self._event_loop, thread)
        try:
            self._run(self._engine.start())
        except BaseException:
            self._close()
            raise

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        adapter: str = "",
        use_tqdm: bool = True,
    ) -> list[list[Completion]]:
        """Per prompt, the params.n completions. prompts: one text, texts, or token id lists; adapter: name
        of one of the setting `adapters`.

        Raises InvalidParameter for what can never be served, RequestFailed if the engine fails."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        encode = self._engine.tokenizer.encode
        ids = [encode(prompt, allow_special=True) if isinstance(prompt, str) else list(prompt) for prompt in texts]
        return self._run(self._generate(ids, params or SamplingParams(), adapter, use_tqdm))

    def _run(self, coroutine: Coroutine[None, None, Result]) -> Result:
        if self._event_loop.is_closed():
            coroutine.close()
            raise RuntimeError("This LLM has been closed.")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._event_loop)
        try:
            return future.result()
        finally:
            future.cancel()  # an interrupted caller ends what it asked for

    async def _generate(
        self, ids: list[list[int]], params: SamplingParams, adapter: str, progress: bool
    ) -> list[list[Completion]]:
        if not ids:
            return []
        completions = [[Completion() for _ in range(params.n)] for _ in ids]
        assemblers = [[Assembler(self._engine.tokenizer, params) for _ in range(params.n)] for _ in ids]
        if params.structured is not None:
            await self._engine.compile(params.structured)
        stream = self._engine.generate(ids, params, adapter=adapter)
        try:
            with tqdm(total=len(ids) * params.n, disable=not progress, unit="seq") as bar:
                async for outputs in stream:
                    for output in outputs:
                        key = (output.prompt_index, output.choice_index)
                        completion, assembler = completions[key[0]][key[1]], assemblers[key[0]][key[1]]
                        completion.text += "".join(piece.text for piece in assembler.feed(output))
                        completion.token_ids += output.token_ids
                        completion.logprobs += output.logprobs
                        completion.num_cached_tokens = output.num_cached_tokens
                        for chunk in output.prompt_logprobs:
                            for each in completions[key[0]]:
                                each.prompt_logprobs += chunk.logprobs
                        if assembler.finish_reason is not None:
                            completion.finish_reason = assembler.finish_reason
                            del completion.token_ids[assembler.num_tokens :]
                            del completion.logprobs[assembler.num_tokens :]
                            stream.finish(*key)
                            bar.update()
        finally:
            stream.close()
        return completions

    def close(self) -> None:
        """End the engine thread and free the model. May be called again."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _shut_down(engine: AsyncEngine, event_loop: asyncio.AbstractEventLoop, thread: Thread) -> None:
    asyncio.run_coroutine_threadsafe(engine.stop(), event_loop).result()
    event_loop.call_soon_threadsafe(event_loop.stop)
    thread.join()
    event_loop.close()
