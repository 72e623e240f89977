"""The wire type of POST /v1/responses, and its translation into a chat request.

A Responses request is a conversation like any other: items become messages, `text.format` a response_format, tools
functions. What chat finds wrong is told in this API's words (`in_our_words`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import BeforeValidator, FailFast

from server.protocol.chat import ChatRequest
from server.protocol.common import GenerationRequest, StreamOptions
from server.protocol.errors import ApiError, InvalidRequest, retold
from server.protocol.fields import WireModel, shape
from server.protocol.parsing import at_most, check_fields, short
from server.protocol.response_fields import ITEMS, TOOL_CHOICE, TOOLS
from server.protocol.response_items import Item, to_messages
from server.protocol.response_tools import Tools

MAX_METADATA = 16
MAX_METADATA_KEY = 64  # characters
MAX_METADATA_VALUE = 512
MAX_INCLUDE = 64
LOGPROBS = "message.output_text.logprobs"
SEALED = "reasoning.encrypted_content"
# fields that would change the answer, or where it comes from, in ways that we do not offer
REFUSED = {
    "conversation": "conversations are not supported: use previous_response_id, or send the whole input.",
    "prompt": "stored prompts are not supported: send instructions and input.",
    "context_management": "context_management is not supported: send what the model shall see.",
    "moderation": "moderation is not supported.",
    "n": "n is not supported: a response has one answer.",
    "max_tokens": "max_tokens is not supported here: use max_output_tokens.",
    "response_format": "response_format is not supported here: use text.format.",
    "return_token_ids": "return_token_ids is not supported here.",
}
_SHARED = tuple(
    name
    for name in GenerationRequest.model_fields
    if name not in ("n", "max_tokens", "stream_options", "response_format", "return_token_ids")
)


def _without_nulls(value: object) -> object:
    return {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value


class ResponseStreamOptions(StreamOptions):
    """Our events are never padded, and their end always tells the usage."""

    hints: ClassVar = StreamOptions.hints | {"include_usage"}


class ReasoningOptions(WireModel):
    """effort goes to the template."""

    hints: ClassVar = frozenset({"context", "generate_summary", "mode", "summary"})

    effort: str | None = None


class TextOptions(WireModel):
    hints: ClassVar = frozenset({"verbosity"})
    shapes: ClassVar = {"format": shape("type", "name", "schema", "strict", hints=("description",))}

    format: dict[str, Any] | None = None


class ResponsesRequest(GenerationRequest):
    """Body of POST /v1/responses."""

    hints: ClassVar = GenerationRequest.hints | {
        "access_programs", "background_options", "client_metadata", "image", "max_tool_calls", "personality",
        "service_tier",
    }  # fmt: skip
    shapes: ClassVar = {"input": ITEMS, "tools": TOOLS, "tool_choice": TOOL_CHOICE}

    input: Annotated[str | list[Any] | None, at_most("messages")] = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    tools: Annotated[list[dict[str, Any]] | None, FailFast(), at_most("tools")] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: Annotated[list[str] | None, FailFast(), at_most(MAX_INCLUDE)] = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Annotated[dict[str, str] | None, BeforeValidator(_without_nulls)] = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    @property
    def wants_sealed(self) -> bool:
        """Whether reasoning items carry `encrypted_content`."""
        return SEALED in (self.include or ())

    @property
    def ignored(self) -> list[str]:
        """What is asked for in `include` and never there, as words for a header."""
        return [f"include.{name}" for name in self.include or () if name not in (LOGPROBS, SEALED)]

    def check(self) -> None:
        """Raises InvalidRequest for what is wrong or not offered."""
        for param, told in REFUSED.items():
            value = getattr(self, param)
            if not (value is None or value is False or value == [] or (param == "n" and value == 1)):
                raise InvalidRequest(told, param=param)
        self.check_common()
        if self.background and not self.stored:
            raise InvalidRequest("background needs store: the response is fetched later.", param="store")
        if self.input is None and self.previous_response_id is None:
            raise InvalidRequest(
                "You must provide the parameter input.", param="input", code="missing_required_parameter"
            )
        if self.input == [] and self.previous_response_id is None:
            raise InvalidRequest("input must not be empty.", param="input")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            told = f"max_output_tokens must be at least 1, got {self.max_output_tokens}."
            raise InvalidRequest(told, param="max_output_tokens")
        self._check_metadata()

    def _check_metadata(self) -> None:
        pairs = self.metadata or {}
        if len(pairs) > MAX_METADATA:
            told = f"metadata must have at most {MAX_METADATA} pairs, got {len(pairs)}."
            raise InvalidRequest(told, param="metadata")
        for key, value in pairs.items():
            if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
                raise InvalidRequest(
                    f"metadata has keys of at most {MAX_METADATA_KEY} characters and values of at most "
                    f"{MAX_METADATA_VALUE}; {short(key)} breaks that.",
                    param="metadata",
                )

    def to_chat(self, items: Sequence[Item], tools: Tools) -> ChatRequest:
        """The chat request that says the same. items: the whole conversation, as `Reader` makes them.

        Raises InvalidRequest."""
        choice, chosen = tools.choose(self.tool_choice)
        if not chosen and choice == "auto":
            choice = None
        messages = to_messages(items)
        if self.instructions:
            messages.insert(0, {"role": "developer", "content": self.instructions})
        if not messages:
            raise InvalidRequest("input has nothing that the model could answer.", param="input")
        body = check_fields({
            "messages": messages,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "response_format": self._format(),
            "tools": chosen or None,
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "reasoning_effort": self.reasoning.effort if self.reasoning else None,
            "chat_template_kwargs": self.chat_template_kwargs,
        }, ChatRequest)  # fmt: skip
        return body.model_copy(update={name: getattr(self, name) for name in _SHARED})

    def _format(self) -> dict[str, Any] | None:
        """`text.format` as chat's response_format: there the schema lies one level deeper."""
        given = self.text.format if self.text else None
        if given is None or given.get("type") != "json_schema":
            return given
        inner = {key: given[key] for key in ("name", "description", "schema", "strict") if key in given}
        return {"type": "json_schema", "json_schema": inner}


def echo(body: ResponsesRequest, tools: Tools, *, temperature: float, top_p: float) -> dict[str, Any]:
    """What a response repeats of its request, with the defaults that took effect, hints included. What may be large is
    rendered here, once, for the several events that tell it."""
    text, reasoning = body.text or TextOptions(), body.reasoning or ReasoningOptions()
    hints, verbosity = body.model_extra or {}, (text.model_extra or {}).get("verbosity")
    words = ("prompt_cache_key", "safety_identifier", "user")
    max_tool_calls = hints.get("max_tool_calls")
    return {name: hints[name] if isinstance(hints.get(name), str) else None for name in words} | {
        "background": body.background is True,
        "instructions": _rendered(body.instructions),
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": max_tool_calls if type(max_tool_calls) is int else None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": body.stored,
        "temperature": temperature,
        "text": {
            "format": _rendered(text.format or {"type": "text"}),
            "verbosity": verbosity if verbosity in ("low", "medium", "high") else None,
        },
        "tool_choice": _rendered("auto" if body.tool_choice is None else body.tool_choice),
        "tools": _rendered(tools.echoed),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": top_p,
        "truncation": body.truncation or "disabled",
    }


def _rendered(value: Any) -> orjson.Fragment:
    return orjson.Fragment(orjson.dumps(value))


_PARAMS = (
    (re.compile(r"messages(\[.*)?"), "input"),
    (re.compile(r"max_completion_tokens|max_tokens"), "max_output_tokens"),
    (re.compile(r"response_format\.json_schema"), "text.format"),
    (re.compile(r"response_format"), "text.format"),
    (re.compile(r"reasoning_effort"), "reasoning.effort"),
    (re.compile(r"tools\[.*"), "tools"),
    (re.compile(r"tool_choice\.(function|custom|allowed_tools)\b.*"), "tool_choice"),
)


_TOOL = re.compile(r"tools\[(\d+)\]\.(?:function|custom)")


def in_our_words(error: ApiError, tools: Tools | None = None) -> ApiError:
    """An error about a field of the chat request, about the field that it came from. tools: the request's."""
    found = _TOOL.match(error.param or "")
    if found is not None and tools is not None and (path := tools.path(int(found[1]))) is not None:
        chat_path = error.param or ""
        param = path + chat_path[found.end() :].replace(".format.grammar", ".format")
        told = param + error.message[len(chat_path) :] if error.message.startswith(chat_path) else error.message
        return ApiError(error.status, told, error.type, param, error.code, error.headers)
    return retold(error, _PARAMS)
