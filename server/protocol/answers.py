"""Answers on the wire: the chunks of a stream and the whole of a plain answer, for both endpoints.

A chunk's unchanging parts are rendered once per answer; per piece there is one bytes join and one JSON string.
All chunks of a stream share id, created and model; ids are the server's own.
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
from server.protocol.logprobs import chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"

_NULL = b"null"


class AnswerWriter(ABC):
    """Renders one answer. Subclasses say what a choice looks like.

    include_usage: the stream ends with a usage chunk and every other chunk says "usage": null."""

    chunk_object: str
    answer_object: str
    id_prefix: str

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, fingerprint: str, logprobs: bool, include_usage: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._include_usage = include_usage
        self._common = {
            "id": self.id_prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }
        head = orjson.dumps(self._common | {"object": self.chunk_object})
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"

    @property
    def id(self) -> str:
        return str(self._common["id"])

    @abstractmethod
    def event(self, index: int, piece: Piece) -> bytes:
        """The stream event(s) of one piece of choice `index`."""

    @abstractmethod
    def choice(self, index: int, text: str, entries: Sequence[TokenEntry], finish_reason: str) -> dict[str, Any]:
        """One choice of a plain answer."""

    def last_events(self, usage: Usage) -> bytes:
        """What follows the last piece: usage, if asked for, and [DONE]."""
        if not self._include_usage:
            return DONE
        chunk = self._common | {"object": self.chunk_object, "choices": [], "usage": usage.to_wire()}
        return b"data: " + orjson.dumps(chunk) + b"\n\n" + DONE

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The plain answer; pieces: per choice, in order."""
        choices = []
        for index, parts in enumerate(pieces):
            text = "".join(part.text for part in parts)
            entries = [entry for part in parts for entry in part.entries]
            choices.append(self.choice(index, text, entries, parts[-1].finish_reason or "stop"))
        return orjson.dumps(
            self._common | {"object": self.answer_object, "choices": choices, "usage": usage.to_wire()}
        )


class CompletionWriter(AnswerWriter):
    chunk_object = "text_completion"
    answer_object = "text_completion"
    id_prefix = "cmpl-"

    def event(self, index: int, piece: Piece) -> bytes:
        logprobs = orjson.dumps(completion_logprobs(self._tokenizer, piece.entries)) if self._logprobs else _NULL
        return b"".join((
            self._head, b'{"index":%d,"text":' % index, orjson.dumps(piece.text), b',"logprobs":', logprobs,
            b',"finish_reason":', orjson.dumps(piece.finish_reason), b"}", self._tail,
        ))  # fmt: skip

    def choice(self, index: int, text: str, entries: Sequence[TokenEntry], finish_reason: str) -> dict[str, Any]:
        return {
            "index": index,
            "text": text,
            "logprobs": completion_logprobs(self._tokenizer, entries) if self._logprobs else None,
            "finish_reason": finish_reason,
        }


class ChatWriter(AnswerWriter):
    chunk_object = "chat.completion.chunk"
    answer_object = "chat.completion"
    id_prefix = "chatcmpl-"

    def __init__(
        self, tokenizer: Tokenizer, *, model: str, fingerprint: str, logprobs: bool, include_usage: bool
    ) -> None:
        super().__init__(
            tokenizer, model=model, fingerprint=fingerprint, logprobs=logprobs, include_usage=include_usage
        )
        self._begun: set[int] = set()  # choices whose role was sent

    def event(self, index: int, piece: Piece) -> bytes:
        delta = b'{"content":%b}' % orjson.dumps(piece.text) if piece.text else b"{}"
        logprobs = orjson.dumps(chat_logprobs(self._tokenizer, piece.entries)) if self._logprobs else _NULL
        chunk = self._chunk(index, delta, logprobs, orjson.dumps(piece.finish_reason))
        if index in self._begun:
            return chunk
        self._begun.add(index)
        return self._chunk(index, b'{"role":"assistant","content":""}', _NULL, _NULL) + chunk

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish_reason: bytes) -> bytes:
        return b"".join((
            self._head, b'{"index":%d,"delta":' % index, delta, b',"logprobs":', logprobs,
            b',"finish_reason":', finish_reason, b"}", self._tail,
        ))  # fmt: skip

    def choice(self, index: int, text: str, entries: Sequence[TokenEntry], finish_reason: str) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(self._tokenizer, entries) if self._logprobs else None,
            "finish_reason": finish_reason,
        }
