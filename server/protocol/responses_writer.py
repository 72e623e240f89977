"""The answers of POST /v1/responses: a response object, plain or at the end of its events.

The stream ends with response.completed, .incomplete or .failed, as OpenAI's does: there is no [DONE].
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from engine.sampling_params import ReasoningMarks
from engine.text import Piece
from engine.tokenizer import Tokenizer
from server.assemble import Usage
from server.parsers.base import Part
from server.protocol.conversation_writer import Choice, ConversationWriter, NewParser
from server.protocol.errors import ApiError
from server.protocol.logprobs import chat_logprobs
from server.protocol.response_items import new_id
from server.protocol.response_output import Events, Output
from server.protocol.response_tools import Tools
from server.protocol.responses import in_our_words

FAILURES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # the codes of a response that OpenAI has for them

Keep = Callable[[dict[str, Any]], object]


class ResponsesWriter(ConversationWriter):
    """echo: what the response repeats of its request. keep: told the finished response. sealed: reasoning items carry
    `encrypted_content`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        echo: dict[str, Any],
        tools: Tools,
        logprobs: bool,
        sealed: bool,
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
            "status": "in_progress",
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
        self._cut = False  # by the token limit

    # -- streamed --------------------------------------------------------------------------------------------------

    def first_events(self, usage: Usage) -> bytes:
        created = self._events("response.created", response=self._response)
        return created + self._events("response.in_progress", response=self._response)

    def events(self, index: int, parts: Sequence[Part], piece: Piece) -> bytes:
        logprobs = chat_logprobs(self._tokenizer, piece.entries)["content"] if self._logprobs else ()
        events = self._output.feed(parts, logprobs)
        return events if piece.finish_reason is None else events + self._end(piece.finish_reason)

    def last_events(self, usage: Usage) -> bytes:
        response = self._finished(self.counted(usage))
        return self._events(f"response.{response['status']}", response=response)

    def error_events(self, error: ApiError) -> bytes:
        """An error event, in the words that OpenAI documents and in those that its SDK raises for; then the end."""
        error = in_our_words(error)
        told = {"type": error.type, "code": error.code, "message": error.message, "param": error.param}
        event = self._events("error", code=error.code, message=error.message, param=error.param, error=told)
        code = FAILURES.get(error.status, "server_error")
        failed = {"status": "failed", "error": {"code": code, "message": error.message}}
        response = self._response | failed | {"output": self._output.items}
        return event + self._events("response.failed", response=response)

    # -- plain -----------------------------------------------------------------------------------------------------

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """With logprobs piece by piece, as streamed, so that each token's stays with its text."""
        if not self._logprobs:
            return super().answer(pieces, usage)
        for piece in pieces[0]:
            self.event(0, piece)
        return orjson.dumps(self._finished(self.counted(usage)))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        self._output.feed(choices[0].parts)
        self._end(choices[0].finish_reason)
        return orjson.dumps(self._finished(usage))

    # -- both ------------------------------------------------------------------------------------------------------

    def _end(self, finish_reason: str) -> bytes:
        self._cut = finish_reason == "length"
        return self._output.end(cut=self._cut or self.is_cut(0))

    def _finished(self, usage: Usage) -> dict[str, Any]:
        response = self._response
        response["status"] = "incomplete" if self._cut else "completed"
        response["incomplete_details"] = {"reason": "max_output_tokens"} if self._cut else None
        response["completed_at"] = None if self._cut else int(time.time())
        response["output"] = self._output.items
        response["usage"] = usage_to_wire(usage)
        if self._keep is not None:
            self._keep(response)
        return response


def usage_to_wire(usage: Usage) -> dict[str, Any]:
    """This API's usage object. Nobody pays for writes to the prefix cache, so none are told."""
    return {
        "input_tokens": usage.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens or 0},
        "total_tokens": usage.num_prompt_tokens + usage.num_completion_tokens,
    }
