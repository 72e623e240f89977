"""The answers of POST /v1/responses: a response object, plain or at the end of its events.

The stream ends with response.completed, .incomplete or .failed, as OpenAI's does: there is no [DONE]. OpenAI has no
event for a response that was cancelled: it ends with response.failed, and the response in it says "cancelled".

A response is looked at, and cancelled, while it is written, from other threads. There is a lock, but not on the path
that every token takes: who looks while an item grows sees it before or after the token, and who cancels then ends the
answer behind it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.sampling_params import ReasoningMarks
from engine.text import Piece
from engine.tokenizer import Tokenizer
from server.assemble import Usage
from server.parsers.base import Part
from server.protocol.conversation_writer import Choice, ConversationWriter, NewParser, one_piece
from server.protocol.errors import ApiError
from server.protocol.logprobs import chat_logprobs
from server.protocol.response_items import new_id
from server.protocol.response_output import Events, Output
from server.protocol.response_tools import Tools
from server.protocol.responses import in_our_words

FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # the codes of a response that OpenAI has for them

Keep = Callable[[dict[str, Any]], object]


class ResponsesWriter(ConversationWriter):
    """echo: what the response repeats of its request. keep: told the response when it has ended, in whatever way.
    sealed: reasoning items carry `encrypted_content`. queued: it says so until its first token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        echo: dict[str, Any],
        tools: Tools,
        logprobs: bool,
        sealed: bool,
        queued: bool = False,
        keep: Keep | None = None,
        new_parser: NewParser | None = None,
        reasoning: ReasoningMarks | None = None,
    ) -> None:
        super().__init__(new_id("resp_"), tokenizer, new_parser=new_parser, reasoning=reasoning)
        self._response: dict[str, Any] = {
            "id": self.id,
            "object": "response",
            "created_at": int(time.time()),
            "completed_at": None,
            "status": "queued" if queued else "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "usage": None,
            **echo,
        }
        self._events = Events()
        self._output = Output(tools, self._events, sealed=sealed)
        self._logprobs = logprobs
        self._keep = keep
        self._is_queued = queued
        self._is_whole = False  # its last piece was taken
        self._cut = False  # by the token limit
        self._num_fed = 0  # pieces of a plain answer that were looked into before its end
        self._lock = threading.RLock()
        self.final: dict[str, Any] | None = None  # the response when it has ended

    # -- streamed --------------------------------------------------------------------------------------------------

    def first_events(self, usage: Usage) -> bytes:
        created = self._events("response.created", response=self._response)
        return created + self._events(f"response.{self._response['status']}", response=self._response)

    def event(self, index: int, piece: Piece) -> bytes:
        if self.is_cancelled:
            return b""
        if self._is_queued:
            return self._begun() + super().event(index, piece)
        return super().event(index, piece)

    def _begun(self) -> bytes:
        self._is_queued = False
        self._response["status"] = "in_progress"
        return self._events("response.in_progress", response=self._response)

    def events(self, index: int, parts: Sequence[Part], piece: Piece) -> bytes:
        logprobs = chat_logprobs(self._tokenizer, piece.entries)["content"] if self._logprobs else ()
        events = self._output.feed(parts, logprobs)
        return events if piece.finish_reason is None else events + self._end(piece.finish_reason)

    def last_events(self, usage: Usage) -> bytes:
        with self._lock:
            closed = self._output.end(cut=True) if self.is_cancelled else b""
            response = self._finished(self.counted(usage))
            kind = "failed" if self.is_cancelled else response["status"]
            return closed + self._events(f"response.{kind}", response=response)

    def error_events(self, error: ApiError) -> bytes:
        """An error event, in the words that OpenAI documents and in those that its SDK raises for; then the end."""
        error = in_our_words(error)
        told = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
        with self._lock:
            event = self._events("error", code=error.code, message=error.message, param=error.param, error=told)
            return event + self._events("response.failed", response=self.fail(error))

    def fail(self, error: ApiError) -> dict[str, Any]:
        """The response, which ends with this error."""
        code = FAILURES.get(error.status, "server_error")
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        return self._ended(failed | {"output": self._output.items})

    # -- plain -----------------------------------------------------------------------------------------------------

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """With logprobs piece by piece, as streamed, so that each token's stays with its text."""
        with self._lock:
            if not (self._logprobs or self._num_fed or self.is_cancelled):
                return super().answer(pieces, usage)
            self.pieces = pieces
            self._catch_up()
            if self.is_cancelled:
                self._output.end(cut=True)
            return orjson.dumps(self._finished(self.counted(usage)))

    def _catch_up(self) -> None:
        """Look into the pieces of a plain answer that came since the last time."""
        news = self.pieces[0][self._num_fed :]
        self._num_fed += len(news)
        for piece in news if self._logprobs else [one_piece(news)] if news else ():
            if self._is_queued:
                self._begun()
            super().event(0, piece)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        self._output.feed(choices[0].parts)
        self._end(choices[0].finish_reason)
        return orjson.dumps(self._finished(usage))

    # -- both ------------------------------------------------------------------------------------------------------

    def cancel(self) -> bool:
        """From now on nothing more is said; False if all was said before. The stream or the plain answer still has to
        be brought to its end."""
        with self._lock:
            if self._is_whole or self.final is not None:
                return False
            self.is_cancelled = True
            return True

    def snapshot(self, usage: Usage) -> bytes:
        """The response as it is now. May take long where a plain answer is looked into for the first time."""
        with self._lock:
            response = self.final
            if response is None:
                self._catch_up()
                response = dict(self._response)
                if self.is_cancelled:
                    response |= {"status": "cancelled", "usage": usage_to_wire(self.counted(usage))}
                response["output"] = self._output.so_far("incomplete" if self.is_cancelled else "in_progress")
        return orjson.dumps(response)

    def _end(self, finish_reason: str) -> bytes:
        self._is_whole = True
        self._cut = finish_reason == "length"
        return self._output.end(cut=self._cut or self.is_cut(0))

    def _finished(self, usage: Usage) -> dict[str, Any]:
        status = "cancelled" if self.is_cancelled else "incomplete" if self._cut else "completed"
        return self._ended({
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": self._output.items,
            "usage": usage_to_wire(usage),
        })  # fmt: skip

    def _ended(self, ending: dict[str, Any]) -> dict[str, Any]:
        self.final = self._response | ending
        if self._keep is not None:
            self._keep(self.final)
        return self.final


def usage_to_wire(usage: Usage) -> dict[str, Any]:
    """This API's usage object. Nobody pays for writes to the prefix cache, so none are told."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
