"""Answers on the wire: what every writer offers.

`sse.py` knows only `AnswerWriter`: one writer per answer, streamed or plain, in the words of one API. A chunk's
unchanging parts are rendered once per choice; a piece that is a bit of text and nothing else is a JSON string between
two of them.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import orjson

from engine.text import Piece
from server.assemble import Usage
from server.protocol.errors import ApiError

Mould = tuple[bytes, bytes]  # what stands before and behind the text of a chunk that has nothing but text

DONE = b"data: [DONE]\n\n"
NULL = b"null"


class AnswerWriter(ABC):
    """Renders one answer. All methods give bytes that may leave as they are; a stream calls `first_events`, `event`
    per piece, and then `last_events` or `error_events`."""

    ping: bytes = b": ping\n\n"  # breaks the silence of a stream
    is_cancelled = False  # by another request: the answer ends early, and is told all the same
    pieces: Sequence[Sequence[Piece]] = ((),)  # per choice, of a plain answer so far: for who asks before its end

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
        """The plain answer; pieces: per choice, in order, the last of each with a finish_reason unless the answer was
        cancelled."""


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

    def answer(self, choices: Sequence[dict[str, Any] | orjson.Fragment], usage: Usage, **more: object) -> bytes:
        """The plain answer. more: further fields beside the choices."""
        return orjson.dumps(self.common | {"object": self._kind, "choices": choices, "usage": usage.to_wire()} | more)
