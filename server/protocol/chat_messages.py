"""The messages of a conversation on the wire.

Content is text: a string, null or a list of text parts. Anything that would have to be fetched or decoded is refused
by name, before anybody looks at its address.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ValidationInfo, WithJsonSchema

from server.protocol.custom_input import CUSTOM_FIELD
from server.protocol.fields import MAX_FIELDS, WireModel, shape
from server.protocol.parsing import at_most, limit_of, misspelled, short, wrong
from server.raw_json import raw_object

MAX_CALLS = 1024  # in one message
PARTS_PER_MESSAGE = 8  # at most, on average, in the longest conversation that is taken
TEXT_PART_SEPARATOR = "\n"  # between the text parts of one message, as vLLM joins them


Role = Literal["system", "developer", "user", "assistant", "tool", "function"]  # the last: what came before tools
FUNCTION_CALL = shape("name", "arguments", hints=("parsed_arguments",))
TOOL_CALLS = shape(
    "id", "type", function=FUNCTION_CALL, custom=shape("name", "input"), hints=("cache_control", "index")
)
Objects = Annotated[list[dict[str, Any]], at_most(MAX_CALLS)]


class TextPart(WireModel):
    hints: ClassVar = frozenset({"cache_control", "annotations", "prompt_cache_breakpoint"})

    type: str
    text: str


def _content(value: object, info: ValidationInfo) -> object:
    """A string, null or text parts -> a string, None or a tuple of TextPart."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise wrong(f"must be a string or an array of text parts, got {short(value)}.")
    if len(value) > (most := limit_of(info, "messages")):
        raise wrong(f"must have at most {most} parts, got {len(value)}.")
    return tuple(_part(part) for part in value)


def _part(part: object) -> TextPart:
    if isinstance(part, TextPart):
        return part
    if not isinstance(part, dict):
        raise wrong(f"must have only objects as parts, got {short(part)}.")
    kind = part.get("type")
    if kind not in ("text", "refusal"):
        hint = misspelled("type", part) if kind is None else ""
        raise wrong(f"has a part of type {short(kind)}: only text parts are supported by this model.{hint}")
    text = part.get(kind)
    if not isinstance(text, str):
        raise wrong("has a text part without a text string.")
    if len(part) > MAX_FIELDS:
        raise wrong(f"has a part with {len(part)} fields: at most {MAX_FIELDS} are read.")
    rest = {key: value for key, value in part.items() if key not in ("type", kind)}
    return TextPart(type="text", text=text, **rest)


def _few_parts(value: object, info: ValidationInfo) -> object:
    """For the list of messages: parts are counted in all messages before any is made."""
    if isinstance(value, list):
        contents = [message.get("content") for message in value if isinstance(message, dict)]
        count = sum(len(content) for content in contents if isinstance(content, list))
        if count > (most := PARTS_PER_MESSAGE * limit_of(info, "messages")):
            raise wrong(f"must have at most {most} content parts in all, got {count}.")
    return value


FEW_PARTS = BeforeValidator(_few_parts)
CONTENT_SCHEMA = WithJsonSchema({
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {
            "type": "object", "required": ["type", "text"],
            "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        }},
        {"type": "null"},
    ]
})  # fmt: skip


class Message(WireModel):
    """One message."""

    hints: ClassVar = frozenset({
        "refusal", "annotations", "audio", "cache_control", "id", "parsed", "provider_specific_fields", "type",
    })  # fmt: skip
    shapes: ClassVar = {"tool_calls": TOOL_CALLS, "function_call": FUNCTION_CALL}

    role: Role
    content: Annotated[str | tuple[TextPart, ...] | None, BeforeValidator(_content), CONTENT_SCHEMA] = None
    name: str | None = None
    tool_calls: Objects | None = None
    function_call: dict[str, Any] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, tuple):
            return TEXT_PART_SEPARATOR.join(part.text for part in self.content)
        return self.content or ""

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Also the one call of a message from the time before tools."""
        legacy = [{"type": "function", "function": self.function_call}] if self.function_call else []
        return self.tool_calls or legacy

    @property
    def is_complete(self) -> bool:
        """Whether it says anything: only an assistant may call or think instead."""
        instead = self.role == "assistant" and (self.calls or self.reasoning_content or self.reasoning)
        return self.content is not None or bool(instead)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates expect it: content is always a string, a call's arguments an object where
        they are one, and thinking under both names that templates look for."""
        fields: dict[str, Any] = {"role": "tool" if self.role == "function" else self.role, "content": self.text}
        for key in ("name", "tool_call_id"):
            value = getattr(self, key)
            if value is not None:
                fields[key] = value
        thinking = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if thinking is not None and self.role == "assistant":
            fields |= {"reasoning_content": thinking, "reasoning": thinking}
        if self.calls:
            fields["tool_calls"] = [_call_for_template(call) for call in self.calls]
        return fields


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    custom = call.get("custom")
    if call.get("type") == "custom" and isinstance(custom, dict):
        wire = {"name": custom.get("name"), "arguments": {CUSTOM_FIELD: custom.get("input")}}
        return {"id": call.get("id"), "type": "function", "function": wire}
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = raw_object(function["arguments"])
    if arguments is None:
        return call  # a model wrote it; the next turn must not fail for that
    return {**call, "function": {**function, "arguments": arguments}}
