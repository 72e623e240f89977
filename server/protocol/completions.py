"""The wire types of /v1/completions.

Answers are written by `server/protocol/completion_writer.py` as plain JSON values: per-token pydantic would cost more
than everything else a token needs on the event loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

from engine.outputs import SamplingDefaults
from engine.sampling_params import MAX_N, SamplingParams
from server.protocol.common import GenerationRequest
from server.protocol.errors import InvalidRequest
from server.protocol.parsing import limit_of, short, wrong
from server.protocol.structured import structured_output

DEFAULT_MAX_TOKENS = 16  # OpenAI's


def read_prompts(value: object, limit: int) -> object:
    """Any of the four forms -> tuple of prompts, each a string or a tuple of token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise wrong("must be a string, a list of strings, a list of token ids or a list of lists of token ids.")
    if not value:
        raise wrong("must not be an empty list.")
    kinds = set(map(type, value))
    if kinds == {int}:
        return (tuple(value),)
    if len(value) > limit:
        raise wrong(f"must have at most {limit} prompts, got {len(value)}.")
    if kinds == {str}:
        return tuple(value)
    if kinds == {list}:
        return tuple(_token_ids(item, index) for index, item in enumerate(value))
    raise wrong("must have only strings, only token ids or only lists of token ids.")


def _prompts(value: object, info: ValidationInfo) -> object:
    return read_prompts(value, limit_of(info, "prompts"))


PROMPT_SCHEMA = WithJsonSchema({
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
         "minItems": 1},
    ]
})  # fmt: skip


def _token_ids(value: list[object], index: int) -> tuple[object, ...]:
    if not value:
        raise wrong(f"has an empty list of token ids at index {index}.")
    if set(map(type, value)) != {int}:
        odd = next(item for item in value if type(item) is not int)
        raise wrong(f"must have only token ids in its lists, got {short(odd)} at index {index}.")
    return tuple(value)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts), PROMPT_SCHEMA]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    suffix: str | None = None

    @property
    def output_limit(self) -> int:
        return DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def num_told(self) -> int:
        """Choices per prompt in the answer."""
        return 1 if self.n is None else self.n

    @property
    def num_echoed(self) -> int | None:
        """Alternatives of each echoed prompt token; None without an echo of logprobs."""
        return self.logprobs if self.echo else None

    @property
    def num_prompt_alternatives(self) -> int | None:
        """What the engine must find for each prompt token; None for nothing."""
        wanted = [count for count in (self.num_echoed, self.prompt_logprobs) if count is not None]
        return max(wanted) if wanted else None

    def sampling_params(
        self, defaults: SamplingDefaults, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """As for all; a completion has no reasoning, so the form holds from its first token. The best of several are
        told by their logprobs, asked for or not."""
        n = None if self.best_of is None or self.use_beam_search else self.best_of
        if logprobs is None and n is not None and n > self.num_told:
            logprobs = 0
        params = super().sampling_params(defaults, max_tokens=max_tokens, logprobs=logprobs)
        return replace(
            params,
            n=n or params.n,
            prompt_logprobs=self.num_prompt_alternatives,
            structured=structured_output(self),
        )

    def check(self) -> None:
        """Raises InvalidRequest for combinations that are wrong or not offered."""
        self.check_common()
        self._check_best_of()
        if self.use_beam_search and self.num_echoed is not None:
            raise InvalidRequest("echo with logprobs cannot be combined with beam search.", param="echo")
        if self.suffix and self.echo:
            raise InvalidRequest("echo together with suffix is not supported.", param="echo")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs is not available when stream is true (echo with logprobs is).",
                param="prompt_logprobs",
            )

    def _check_best_of(self) -> None:
        if self.best_of is None:
            return
        if not 1 <= self.best_of <= MAX_N:
            raise InvalidRequest(f"best_of must be between 1 and {MAX_N}, got {self.best_of}.", param="best_of")
        if self.best_of < self.num_told:
            raise InvalidRequest(
                f"best_of ({self.best_of}) must not be smaller than n ({self.num_told}).", param="best_of"
            )
        if self.best_of > self.num_told and self.stream:
            raise InvalidRequest("best_of cannot be streamed: the best is known at the end.", param="best_of")
