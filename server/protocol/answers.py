"""Answers on the wire: what every writer offers, and the text completions.

`sse.py` knows only `AnswerWriter`: one writer per answer, streamed or plain, in the words of one API. A chunk's
unchanging parts are rendered once per answer; per piece there is one bytes join and one JSON string.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from engine.text import Piece, TokenEntry
from engine.tokenizer import Tokenizer
from server.assemble import Usage
from server.protocol.errors import ApiError
from server.protocol.logprobs import completion_logprobs

DONE = b"data: [DONE]\n\n"
NULL = b"null"


class AnswerWriter(ABC):
    """Renders one answer. All methods give bytes that may leave as they are; a stream calls `first_events`, `event`
    per piece, and then `last_events` or `error_events`."""

    ping: bytes = b": ping\n\n"  # breaks the silence of a stream

    def __init__(self, id: str) -> None:
        self.id = id

    def first_events(self, usage: Usage) -> bytes:
        """Sent when the stream opens, before the first token. usage: the prompt's tokens, nothing else yet."""
        return b""

    @abstractmethod
    def event(self, index: int, piece: Piece) -> bytes:
        """The stream event(s) of one piece of choice `index`; may be empty."""

    @abstractmethod
    def last_events(self, usage: Usage) -> bytes:
        """What follows the last piece."""

    def error_events(self, error: ApiError) -> bytes:
        """The end of a stream that fails after its beginning."""
        return b"data: " + error.envelope() + b"\n\n" + DONE

    @abstractmethod
    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The plain answer; pieces: per choice, in order, the last of each with a finish_reason."""


class Frame:
    """What the chunks and the plain answer of one OpenAI object have in common.

    include_usage: the stream ends with a usage chunk and every other chunk says "usage": null."""

    def __init__(self, kind: str, *, id_prefix: str, model: str, fingerprint: str, include_usage: bool) -> None:
        """kind: the plain answer's "object"; id_prefix: "cmpl-"."""
        self.common: dict[str, Any] = {
            "id": id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._kind = kind
        self._chunk_kind = "chat.completion.chunk" if kind == "chat.completion" else kind
        self._include_usage = include_usage
        head = orjson.dumps(self.common | {"object": self._chunk_kind})
        self.head = b"data: " + head[:-1] + b',"choices":['  # before a chunk's choice
        self.tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"  # after it

    def last_events(self, usage: Usage) -> bytes:
        """Usage, if asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        chunk = self.common | {"object": self._chunk_kind, "choices": [], "usage": usage.to_wire()}
        return b"data: " + orjson.dumps(chunk) + b"\n\n" + DONE

    def answer(self, choices: Sequence[dict[str, Any]], usage: Usage) -> bytes:
        return orjson.dumps(self.common | {"object": self._kind, "choices": choices, "usage": usage.to_wire()})


class CompletionWriter(AnswerWriter):
    """POST /v1/completions."""

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, fingerprint: str, logprobs: bool, include_usage: bool
    ) -> None:
        self._frame = Frame(
            "text_completion", id_prefix="cmpl-", model=model, fingerprint=fingerprint, include_usage=include_usage
        )
        super().__init__(self._frame.common["id"])
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def event(self, index: int, piece: Piece) -> bytes:
        logprobs = orjson.dumps(completion_logprobs(self._tokenizer, piece.entries)) if self._logprobs else NULL
        return b"".join((
            self._frame.head, b'{"index":%d,"text":' % index, orjson.dumps(piece.text), b',"logprobs":', logprobs,
            b',"finish_reason":', orjson.dumps(piece.finish_reason), b"}", self._frame.tail,
        ))  # fmt: skip

    def last_events(self, usage: Usage) -> bytes:
        return self._frame.last_events(usage)

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        choices = []
        for index, parts in enumerate(pieces):
            text = "".join(part.text for part in parts)
            entries = [entry for part in parts for entry in part.entries]
            choices.append(self._choice(index, text, entries, parts[-1].finish_reason or "stop"))
        return self._frame.answer(choices, usage)

    def _choice(self, index: int, text: str, entries: Sequence[TokenEntry], finish_reason: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(self._tokenizer, entries) if self._logprobs else None,
            "finish_reason": finish_reason,
        }
