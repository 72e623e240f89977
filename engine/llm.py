"""`LLM`: the engine inside your own Python process, synchronous; the same loop that serves HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from tqdm import tqdm

from engine.async_engine import AsyncEngine
from engine.config import EngineConfig
from engine.outputs import RequestFailed, SequenceOutput
from engine.sampling_params import SamplingParams
from engine.tokenizer import Detokenizer, StopMatcher, Tokenizer


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated sequence. token_ids end with the stop token, if one ended it; text does not hold it."""

    prompt_index: int
    choice_index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    num_cached_tokens: int


class LLM:
    """LLM("folder or .gguf").generate(["Once upon a time"], SamplingParams(max_tokens=32)).

    model None is the demo model; `config` replaces every default. Raises StartError if it cannot start."""

    def __init__(self, model: str | None = None, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        if model is not None:
            config = replace(config, model=replace(config.model, model=model))
        # nobody else is waiting: the queue is bounded by the caller's own list
        unbounded = replace(config.scheduler, max_waiting_requests=2**31, max_waiting_tokens=2**62)
        config = replace(config, scheduler=unbounded)
        self._event_loop = asyncio.new_event_loop()
        self._engine = AsyncEngine(config)
        self._event_loop.run_until_complete(self._engine.start())

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[list[Completion]]:
        """Per prompt, the params.n completions. prompts: one text, texts, or token id lists."""
        texts = [prompts] if isinstance(prompts, str) else prompts
        ids = [self._engine.tokenizer.encode(p, allow_special=True) if isinstance(p, str) else list(p) for p in texts]
        params = params or SamplingParams()
        return self._event_loop.run_until_complete(self._generate(ids, params, use_tqdm))

    async def _generate(self, ids: list[list[int]], params: SamplingParams, progress: bool) -> list[list[Completion]]:
        done: list[list[Completion]] = [[] for _ in ids]
        writers: dict[tuple[int, int], _Writer] = {}
        with tqdm(total=len(ids) * params.n, disable=not progress, unit="seq") as bar:
            stream = self._engine.generate(ids, params)
            try:
                async for outputs in stream:
                    for output in outputs:
                        key = (output.prompt_index, output.choice_index)
                        if key not in writers:
                            writers[key] = _Writer(self._engine.tokenizer, params)
                        completion = writers[key].feed(output)
                        if completion is not None:
                            stream.finish(*key)
                            done[key[0]].append(completion)
                            bar.update()
            finally:
                stream.close()
        return [sorted(completions, key=lambda c: c.choice_index) for completions in done]

    def close(self) -> None:
        """End the engine thread and free the model. May be called again."""
        if not self._event_loop.is_closed():
            self._event_loop.run_until_complete(self._engine.stop())
            self._event_loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class _Writer:
    """Text of one sequence: detokenize, search stop strings, collect."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopMatcher(params.stop, include_stop=params.include_stop_str_in_output)
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[float] = []

    def feed(self, output: SequenceOutput) -> Completion | None:
        """The completion, once it is complete. Raises RequestFailed."""
        if output.finish_reason == "error":
            raise RequestFailed(output.error or "The request failed.")
        for token_id, logprob in zip(output.token_ids, output.logprobs, strict=True):
            self._token_ids.append(token_id)
            self._logprobs.append(logprob)
            if token_id == output.stop_token_id and len(self._token_ids) and output.token_ids[-1] is token_id:
                continue
            text, hit = self._stops.feed(self._detokenizer.feed((token_id,)))
            self._text += text
            if hit:
                return self._complete(output, "stop")
        if output.finish_reason is None:
            return None
        text, hit = self._stops.feed(self._detokenizer.finish())
        self._text += text if hit else text + self._stops.finish()
        return self._complete(output, "stop" if hit else output.finish_reason)

    def _complete(self, output: SequenceOutput, finish_reason: str) -> Completion:
        return Completion(
            output.prompt_index,
            output.choice_index,
            self._text,
            tuple(self._token_ids),
            tuple(self._logprobs),
            finish_reason,
            output.num_cached_tokens,
        )
