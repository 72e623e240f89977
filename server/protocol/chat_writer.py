"""The answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson

from engine.sampling_params import ReasoningMarks
from engine.text import Piece, TokenEntry
from engine.tokenizer import Tokenizer
from server.assemble import Usage
from server.parsers.base import CallArguments, CallBegin, Content, Part, Reasoning
from server.protocol.answers import NULL, Frame, Mould
from server.protocol.conversation_writer import Choice, ConversationWriter, NewParser, joined
from server.protocol.logprobs import chat_logprobs, prompt_logprobs
from server.shown_prompt import ShownPrompt

KINDS = (("function", "arguments"), ("custom", "input"))
_ROLE = b'{"role":"assistant","content":""}'


class ChatWriter(ConversationWriter):
    """reasoning_fields: the names under which thinking is told. custom_tools: names of tools whose calls are of type
    "custom", with free text where functions have arguments. prompt_ids: the prompt's tokens, where token ids are to be
    told: these once, beside the choices, and each choice's own. prompt_logprobs: the prompt and how many alternatives
    of each of its tokens are told beside the choices (plain answers only)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        model: str,
        fingerprint: str,
        logprobs: bool,
        include_usage: bool,
        new_parser: NewParser | None = None,
        reasoning: ReasoningMarks | None = None,
        reasoning_fields: Sequence[str] = ("reasoning_content",),
        custom_tools: Collection[str] = (),
        prompt_ids: Sequence[int] | None = None,
        prompt_logprobs: tuple[ShownPrompt, int] | None = None,
    ) -> None:
        self._frame = Frame(
            "chat.completion", id_prefix="chatcmpl-", model=model, fingerprint=fingerprint, include_usage=include_usage
        )
        super().__init__(self._frame.common["id"], tokenizer, new_parser=new_parser, reasoning=reasoning)
        self._logprobs = logprobs
        self._reasoning_fields = tuple(reasoning_fields)
        self._custom_tools = custom_tools
        self._custom_calls: set[tuple[int, int]] = set()  # (choice, call)
        self._begun: set[int] = set()  # choices whose role was sent
        self._moulds: dict[int, Mould] = {}  # of those whose pieces may be mere content
        self._prompt_ids = prompt_ids
        self._prompt_logprobs = prompt_logprobs

    def events(self, index: int, parts: Sequence[Part], piece: Piece) -> bytes:
        mould = self._moulds.get(index)
        if mould is not None and len(parts) == 1 and type(parts[0]) is Content and piece.finish_reason is None:
            return mould[0] + orjson.dumps(parts[0].text) + mould[1]
        deltas = [self._delta(index, part) for part in (joined(parts) if len(parts) > 1 else parts)]
        finish = orjson.dumps(self.finish_reason(index, piece))
        told = b"" if self._prompt_ids is None else b',"token_ids":' + orjson.dumps(piece.token_ids)
        if not deltas and (piece.finish_reason is not None or piece.entries or told):
            deltas = [b"{}"]
        logprobs = orjson.dumps(self._chat_logprobs(*self.split(index, piece))) if self._logprobs else NULL
        chunks = [] if index in self._begun else [self._begin(index)]
        for k, delta in enumerate(deltas):  # a piece's logprobs go with its first delta, its end with its last
            is_last = k == len(deltas) - 1
            chunks.append(
                self._chunk(index, delta, NULL if k else logprobs, finish if is_last else NULL, b"" if k else told)
            )
        return b"".join(chunks)

    def _delta(self, choice: int, part: Part) -> bytes:
        match part:
            case Content(text):
                return b'{"content":%b}' % orjson.dumps(text)
            case Reasoning(text):
                return orjson.dumps(dict.fromkeys(self._reasoning_fields, text))
            case CallBegin(index, id, name):
                if name in self._custom_tools:
                    self._custom_calls.add((choice, index))
                return orjson.dumps({"tool_calls": [{"index": index} | self._call(id, name)]})
            case CallArguments(index, text):
                kind, key = KINDS[(choice, index) in self._custom_calls]
                return orjson.dumps({"tool_calls": [{"index": index, kind: {key: text}}]})

    def _call(self, id: str, name: str) -> dict[str, Any]:
        """A call that has just begun."""
        kind, key = KINDS[name in self._custom_tools]
        return {"id": id, "type": kind, kind: {"name": name, key: ""}}

    def _begin(self, index: int) -> bytes:
        """The first chunk of a choice."""
        is_first = not self._begun
        self._begun.add(index)
        if not self._logprobs and self._prompt_ids is None:
            before, _, behind = self._chunk(index, b'{"content":\0}', NULL, NULL).rpartition(b"\0")
            self._moulds[index] = before, behind
        chunk = self._chunk(index, _ROLE, NULL, NULL)
        if self._prompt_ids is None or not is_first:
            return chunk
        ids = b'],"prompt_token_ids":' + orjson.dumps(list(self._prompt_ids))
        return chunk.removesuffix(self._frame.tail) + ids + self._frame.tail[1:]

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, finish_reason: bytes, more: bytes = b"") -> bytes:
        return b"".join((
            self._frame.head, b'{"index":%d,"delta":' % index, delta, b',"logprobs":', logprobs,
            b',"finish_reason":', finish_reason, more, b"}", self._frame.tail,
        ))  # fmt: skip

    def last_events(self, usage: Usage) -> bytes:
        return self._frame.last_events(self.counted(usage))

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        more: dict[str, Any] = {}
        if self._prompt_ids is not None:
            more["prompt_token_ids"] = list(self._prompt_ids)
        if self._prompt_logprobs is not None:
            more["prompt_logprobs"] = prompt_logprobs(self._tokenizer, *self._prompt_logprobs)
        return self._frame.answer([self._wire(choice) for choice in choices], usage, **more)

    def _wire(self, choice: Choice) -> dict[str, Any]:
        told: dict[str, Any] = {
            "index": choice.index,
            "message": self._message(choice.parts),
            "logprobs": self._chat_logprobs(choice.thinking, choice.entries) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }
        if self._prompt_ids is not None:
            told["token_ids"] = list(choice.token_ids)
        return told

    def _chat_logprobs(self, thinking: Sequence[TokenEntry], entries: Sequence[TokenEntry]) -> dict[str, Any]:
        """OpenAI's object tells of the content's tokens; where a model thinks, those of its thinking stand beside."""
        told = chat_logprobs(self._tokenizer, entries)
        if self._reasoning is not None:
            told["reasoning_content"] = chat_logprobs(self._tokenizer, thinking)["content"]
        return told

    def _message(self, parts: Sequence[Part]) -> dict[str, Any]:
        content = "".join(part.text for part in parts if isinstance(part, Content))
        thinking = "".join(part.text for part in parts if isinstance(part, Reasoning))
        calls = self._calls(parts)
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
        if thinking:
            message |= dict.fromkeys(self._reasoning_fields, thinking)
        if calls:
            message["tool_calls"] = calls
        return message

    def _calls(self, parts: Sequence[Part]) -> list[dict[str, Any]]:
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            if isinstance(part, CallBegin):
                calls[part.index] = self._call(part.id, part.name)
            elif isinstance(part, CallArguments):
                call = calls[part.index]
                kind, key = KINDS[call["type"] == "custom"]
                call[kind][key] += part.text
        return list(calls.values())
