"""The wire types of /v1/chat/completions.

Content is text: a string, null or a list of text parts. Anything that would have to be fetched or decoded is refused
by name, before anybody looks at its address.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast

from engine.sampling_params import MAX_LOGPROBS
from server.protocol.common import GenerationRequest, at_most, short, wrong
from server.protocol.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_MODALITIES = 16
TEXT_PART_SEPARATOR = "\n"  # between the text parts of one message, as vLLM joins them

Objects = Annotated[list[dict[str, Any]], at_most(MAX_TOOLS)]
Role = Literal["system", "developer", "user", "assistant", "tool"]


def _content(value: object) -> object:
    """A string, null or text parts -> a string (None stays None)."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong(f"must be a string or an array of text parts, got {short(value)}.")
    return TEXT_PART_SEPARATOR.join(_text_part(part) for part in value)


def _text_part(part: object) -> str:
    if not isinstance(part, dict):
        raise wrong(f"must have only objects as parts, got {short(part)}.")
    kind = part.get("type")
    if kind != "text":
        raise wrong(f"has a part of type {short(kind)}: only text parts are supported by this model.")
    text = part.get("text")
    if not isinstance(text, str):
        raise wrong("has a text part without a text string.")
    return text


class Message(BaseModel):
    """One message. Only what a template may look at is kept."""

    model_config = ConfigDict(extra="ignore", strict=True)

    role: Role
    content: Annotated[str | None, BeforeValidator(_content)] = None
    name: str | None = None
    tool_calls: Objects | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is always a string, a call's arguments an object where
        they are one."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content or ""}
        for key in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, key)
            if value is not None:
                fields[key] = value
        if self.tool_calls:
            fields["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return fields


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = orjson.loads(function["arguments"])
    except orjson.JSONDecodeError:
        return call  # a model wrote it; the next turn must not fail for that
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast(), at_most(MAX_MESSAGES)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: Objects | None = None
    modalities: Annotated[list[str], at_most(MAX_MODALITIES)] | None = None

    @property
    def output_limit(self) -> int | None:
        """The smaller of the two limits; None: what remains of the context."""
        limits = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(limits) if limits else None

    @property
    def num_alternatives(self) -> int | None:
        """SamplingParams.logprobs: None without `logprobs`."""
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        """Raises InvalidRequest for combinations that are wrong or not offered."""
        self.check_common()
        self._check_messages()
        self._check_logprobs()
        self._check_format()
        self._check_tools()
        for param in ("max_tokens", "max_completion_tokens"):
            limit = getattr(self, param)
            if limit is not None and limit < 1:
                raise InvalidRequest(f"{param} must be at least 1, got {limit}.", param=param)

    def _check_messages(self) -> None:
        if not self.messages:
            raise InvalidRequest("messages must not be empty.", param="messages")
        for index, message in enumerate(self.messages):
            if message.content is None and not (message.role == "assistant" and message.tool_calls):
                raise InvalidRequest(
                    f"messages[{index}].content must be a string or an array of text parts.",
                    param=f"messages[{index}].content",
                )

    def _check_logprobs(self) -> None:
        top = self.top_logprobs
        if top is None:
            return
        if not 0 <= top <= MAX_LOGPROBS:
            raise InvalidRequest(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {top}.", param="top_logprobs"
            )
        if not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")

    def _check_format(self) -> None:
        if self.response_format is None:
            return
        kind = self.response_format.get("type")
        if kind in ("json_object", "json_schema"):
            raise InvalidRequest(f"response_format {kind} is not supported yet.", param="response_format")
        if kind != "text":
            raise InvalidRequest(f"response_format has the unknown type {short(kind)}.", param="response_format.type")

    def _check_tools(self) -> None:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidRequest("tool_choice needs tools.", param="tool_choice")
        if self.tools and self.tool_choice != "none":
            raise InvalidRequest("tools are not supported yet.", param="tools")
        if self.functions:
            raise InvalidRequest("functions are not supported; they were replaced by tools.", param="functions")
        if self.modalities is not None and self.modalities != ["text"]:
            raise InvalidRequest('modalities must be ["text"]: this model writes text.', param="modalities")
