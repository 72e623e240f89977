"""The answers of POST /v1/messages: content blocks, streamed as that API's events or folded into one message.

The blocks of a plain answer are the fold of the events that a stream would have sent, so the two cannot differ.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from pydantic_core import from_json

from engine.sampling_params import ReasoningMarks
from engine.text import Piece
from engine.tokenizer import Tokenizer
from server.assemble import Usage
from server.parsers.base import CallArguments, CallBegin, Content, Part, Reasoning
from server.protocol import message_errors
from server.protocol.conversation_writer import Choice, ConversationWriter, NewParser, joined
from server.protocol.errors import ApiError
from server.protocol.message_blocks import hold

Event = dict[str, Any]

_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}
_FIELDS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class Blocks:
    """From the parts of one choice to the events of its content blocks.

    Blank text that has not become a block is held back: it is dropped when the block would have been blank, unless
    it is all there is. A block ends when one of another kind begins.

    signature: of thinking blocks that are shown; others hold what they hide."""

    def __init__(self, *, signature: str, shows_thinking: bool) -> None:
        self._signature = signature
        self._shows_thinking = shows_thinking
        self._index = -1
        self._kind: str | None = None  # of the open block
        self._blank: tuple[str, str] = ("text", "")  # kind and blanks that wait for more
        self._hidden: list[str] = []  # the thinking of the open block that is not shown

    def feed(self, part: Part) -> list[Event]:
        match part:
            case Content(text):
                return self._say("text", text)
            case Reasoning(text):
                return self._say("thinking", text)
            case CallBegin(_, id, name):
                call = {"type": "tool_use", "id": _call_id(id), "name": name, "input": {}}
                return [*self._close(), self._open(call)]
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]

    def finish(self) -> list[Event]:
        """Nothing follows."""
        kind, blank = self._blank
        if self._index < 0 and blank and kind == "text":
            return [self._open({"type": "text", "text": ""}), *self._more("text", blank), *self._close()]
        return self._close()

    def _say(self, kind: str, text: str) -> list[Event]:
        if self._kind == kind:
            return self._more(kind, text)
        waiting = self._blank[1] if self._blank[0] == kind else ""
        text = waiting + text
        if not text or text.isspace():
            self._blank = (kind, text)
            return []
        empty = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
        return [*self._close(), self._open(empty), *self._more(kind, text)]

    def _more(self, kind: str, text: str) -> list[Event]:
        if kind == "thinking" and not self._shows_thinking:
            self._hidden.append(text)
            return []
        return [self._delta({"type": _DELTAS[kind], kind: text})]

    def _open(self, block: dict[str, Any]) -> Event:
        self._blank = ("text", "")
        self._index += 1
        self._kind = block["type"]
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> list[Event]:
        if self._kind is None:
            return []
        events = []
        if self._kind == "thinking":
            signature = self._signature if self._shows_thinking else hold("".join(self._hidden))
            self._hidden.clear()
            events.append(self._delta({"type": "signature_delta", "signature": signature}))
        self._kind = None
        return [*events, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, str]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class MessagesWriter(ConversationWriter):
    """One message. max_tokens: what the client asked for, which may be more than the context holds.

    request_id: for the error event of a stream that fails."""

    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        max_tokens: int,
        request_id: str | None,
        shows_thinking: bool = True,
        new_parser: NewParser | None = None,
        reasoning: ReasoningMarks | None = None,
    ) -> None:
        super().__init__("msg_" + secrets.token_hex(12), tokenizer, new_parser=new_parser, reasoning=reasoning)
        self._model = model
        self._max_tokens = max_tokens
        self._request_id = request_id
        self._blocks = Blocks(signature=self.id, shows_thinking=shows_thinking)
        self._reason: str | None = None  # chat's finish reason
        self._stop_string: str | None = None

    def first_events(self, usage: Usage) -> bytes:
        return _render([{"type": "message_start", "message": self._message([], usage)}])

    def events(self, index: int, parts: Sequence[Part], piece: Piece) -> bytes:
        return _render(self._block_events(index, parts, piece))

    def last_events(self, usage: Usage) -> bytes:
        usage = self.counted(usage)
        delta = self._end(usage)
        return _render([
            {"type": "message_delta", "delta": delta, "usage": _usage(usage)},
            {"type": "message_stop"},
        ])  # fmt: skip

    def error_events(self, error: ApiError) -> bytes:
        body = message_errors.envelope(error.status, error.message, self._request_id)
        return b"event: error\ndata: " + body + b"\n\n"

    def answer(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        self._stop_string = pieces[0][-1].stop_string
        return super().answer(pieces, usage)

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        choice = choices[0]
        self._reason = choice.finish_reason
        events = [event for part in choice.parts for event in self._blocks.feed(part)]
        content = folded([*events, *self._blocks.finish()])
        return orjson.dumps(self._message(content, usage) | self._end(usage))

    def _block_events(self, index: int, parts: Sequence[Part], piece: Piece) -> list[Event]:
        events = [event for part in (joined(parts) if len(parts) > 1 else parts) for event in self._blocks.feed(part)]
        if piece.finish_reason is not None:
            self._reason = self.finish_reason(index, piece)
            self._stop_string = piece.stop_string
            events += self._blocks.finish()
        return events

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    def _end(self, usage: Usage) -> dict[str, str | None]:
        match self._reason:
            case "length" if usage.num_completion_tokens < self._max_tokens:
                reason = "model_context_window_exceeded"
            case "length":
                reason = "max_tokens"
            case "tool_calls":
                reason = "tool_use"
            case _:
                reason = "end_turn" if self._stop_string is None else "stop_sequence"
        stopped = self._stop_string if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stopped}


def folded(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The content blocks that a client puts together from these events."""
    blocks: list[dict[str, Any]] = []
    arguments = ""
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
                arguments = ""
            case "content_block_delta" if event["delta"]["type"] == "input_json_delta":
                arguments += event["delta"]["partial_json"]
            case "content_block_delta":
                field = _FIELDS[event["delta"]["type"]]
                blocks[-1][field] += event["delta"][field]
            case _ if blocks[-1]["type"] == "tool_use":
                blocks[-1]["input"] = _arguments(arguments)
    return blocks


def _arguments(text: str) -> dict[str, Any]:
    """Of a call that was cut, what is certain, as that API's clients read a stream that ends there."""
    try:
        value = from_json(text or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _call_id(id: str) -> str:
    """Ids of our making get that API's prefix; a model's own stay, because its template wants them back."""
    return "toolu_" + id.removeprefix("call_") if id.startswith("call_") else id


def _usage(usage: Usage) -> dict[str, Any]:
    """Input is counted without what the cache gave, as that API does."""
    wire: dict[str, Any] = {
        "input_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_completion_tokens,
    }
    if usage.num_reasoning_tokens is not None:
        wire["output_tokens_details"] = {"thinking_tokens": usage.num_reasoning_tokens}
    return wire


def _render(events: Iterable[Event]) -> bytes:
    return b"".join(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event)) for event in events)
