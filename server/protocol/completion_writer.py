"""The answers of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from engine.text import Piece
from engine.tokenizer import Tokenizer
from server.assemble import Usage
from server.protocol.answers import NULL, AnswerWriter, Frame, Mould
from server.protocol.logprobs import completion_logprobs, prompt_logprobs
from server.shown_prompt import ShownPrompt


class CompletionWriter(AnswerWriter):
    """prompts: one per prompt, in order; n: choices of each.

    num_prompt_logprobs: alternatives in the field prompt_logprobs, None for no such field (plain answers only).
    token_ids: choices carry the ids of their tokens, and of their prompt's once."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompts: Sequence[ShownPrompt],
        *,
        n: int,
        model: str,
        fingerprint: str,
        logprobs: bool,
        include_usage: bool,
        num_prompt_logprobs: int | None = None,
        token_ids: bool = False,
    ) -> None:
        self._frame = Frame(
            "text_completion", id_prefix="cmpl-", model=model, fingerprint=fingerprint, include_usage=include_usage
        )
        super().__init__(self._frame.common["id"])
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._n = n
        self._logprobs = logprobs
        self._num_prompt_logprobs = num_prompt_logprobs
        self._token_ids = token_ids
        self._begun: set[int] = set()  # choices whose prompt was shown
        self._moulds: dict[int, Mould] = {}  # of those whose pieces are mere text, up to the last

    def event(self, index: int, piece: Piece) -> bytes:
        mould = self._moulds.get(index)
        if mould is not None and piece.finish_reason is None:
            return mould[0] + orjson.dumps(piece.text) + mould[1]
        prompt = None
        if index not in self._begun:
            self._begun.add(index)
            prompt = self._prompts[index // self._n]
            piece = prompt.before(piece)
            if not self._logprobs and not self._token_ids:
                self._moulds[index] = self._before(index), b',"logprobs":null,"finish_reason":null}' + self._frame.tail
        logprobs = orjson.dumps(completion_logprobs(self._tokenizer, piece.entries)) if self._logprobs else NULL
        return b"".join((
            self._before(index), orjson.dumps(piece.text), b',"logprobs":', logprobs, b',"finish_reason":',
            orjson.dumps(piece.finish_reason), self._ids(prompt, piece.token_ids), b"}", self._frame.tail,
        ))  # fmt: skip

    def _before(self, index: int) -> bytes:
        return self._frame.head + b'{"index":%d,"text":' % index

    def _ids(self, prompt: ShownPrompt | None, token_ids: Sequence[int]) -> bytes:
        if not self._token_ids:
            return b""
        before = b"" if prompt is None else b',"prompt_token_ids":' + orjson.dumps(list(prompt.token_ids))
        return before + b',"token_ids":' + orjson.dumps(list(token_ids))

    def last_events(self, usage: Usage) -> bytes:
        return self._frame.last_events(usage)

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        # each choice becomes bytes at once: as objects, the logprobs of a thousand prompts would be a gigabyte
        choices = [orjson.Fragment(orjson.dumps(self._choice(index, each))) for index, each in enumerate(pieces)]
        return self._frame.answer(choices, usage)

    def _choice(self, index: int, parts: Sequence[Piece]) -> dict[str, Any]:
        prompt = self._prompts[index // self._n]
        first = prompt.before(parts[0])
        entries = [entry for part in (first, *parts[1:]) for entry in part.entries]
        choice: dict[str, Any] = {
            "index": index,
            "text": "".join(part.text for part in (first, *parts[1:])),
            "logprobs": completion_logprobs(self._tokenizer, entries) if self._logprobs else None,
            "finish_reason": parts[-1].finish_reason or "stop",
        }
        if self._num_prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, prompt, self._num_prompt_logprobs)
        if self._token_ids:
            choice["prompt_token_ids"] = list(prompt.token_ids)
            choice["token_ids"] = [token_id for part in parts for token_id in part.token_ids]
        return choice
