"""The wire types of /v1/completions.

Answers are written by `server/sse.py` and `server/routes/completions.py` as plain JSON values: per-token pydantic
would cost more than everything else a token needs on the event loop.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import BeforeValidator

from engine.outputs import SamplingDefaults
from engine.sampling_params import MAX_LOGPROBS, SamplingParams
from server.protocol.common import GenerationRequest, short, wrong
from server.protocol.errors import InvalidRequest
from server.protocol.structured import structured_output

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16  # OpenAI's


def _prompts(value: object) -> object:
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
    if len(value) > MAX_PROMPTS:
        raise wrong(f"must have at most {MAX_PROMPTS} prompts, got {len(value)}.")
    if kinds == {str}:
        return tuple(value)
    if kinds == {list}:
        return tuple(_token_ids(item, index) for index, item in enumerate(value))
    raise wrong("must have only strings, only token ids or only lists of token ids.")


def _token_ids(value: list[object], index: int) -> tuple[object, ...]:
    if not value:
        raise wrong(f"has an empty list of token ids at index {index}.")
    if set(map(type, value)) != {int}:
        odd = next(item for item in value if type(item) is not int)
        raise wrong(f"must have only token ids in its lists, got {short(odd)} at index {index}.")
    return tuple(value)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[tuple[str | tuple[int, ...], ...], BeforeValidator(_prompts)]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def sampling_params(
        self, defaults: SamplingDefaults, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """As for all; a completion has no reasoning, so the form holds from its first token."""
        params = super().sampling_params(defaults, max_tokens=max_tokens, logprobs=logprobs)
        structured = structured_output(self)
        return params if structured is None else replace(params, structured=structured)

    def check(self) -> None:
        """Raises InvalidRequest for combinations that are wrong or not offered."""
        self.check_common()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest("best_of must equal n: other values are not supported.", param="best_of")
        if self.suffix:
            raise InvalidRequest("suffix is not supported.", param="suffix")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"logprobs must be between 0 and {MAX_LOGPROBS}, got {self.logprobs}.", param="logprobs"
            )
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo together with logprobs is not supported yet.", param="echo")
        if self.echo and self.max_tokens == 0:
            raise InvalidRequest("max_tokens 0 with echo is not supported yet.", param="max_tokens")
