"""The wire type of /v1/messages and /v1/messages/count_tokens (Anthropic's Messages API), and its translation into a
chat request: everything behind the door speaks chat.

What may change the answer is translated or refused. Hints are accepted and named, and so are tools that only
Anthropic's own servers can run.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, FailFast

from server.protocol.chat import ChatRequest
from server.protocol.common import stop_list
from server.protocol.errors import ApiError, InvalidRequest, missing, retold
from server.protocol.fields import WireModel, shape
from server.protocol.message_blocks import MESSAGES, SYSTEM, Ignored, chat_messages
from server.protocol.message_tools import client_tool
from server.protocol.parsing import at_most, check_fields, short

# fields of the chat request that are spelled and mean the same here; most are not Anthropic's, but ours
SHARED = (
    "model", "stream", "temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos", "stop_token_ids",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "cache_salt", "chat_template_kwargs",
    "timeout", "priority",
)  # fmt: skip
FORMAT = shape("type", "schema", hints=("name", "description", "strict"))
# fields that would make another answer, or bring words that are not here
REFUSED = {
    "compaction": "compaction is not supported: ask for a summary in a message.",
    "thread": "thread is not supported: send the whole conversation.",
}
_FORMAT_PARAM = re.compile(r"response_format(\.json_schema)?")
_PARAMS = (  # of chat -> ours
    (re.compile(r"(tools\[\d+\])\.function\.parameters"), r"\1.input_schema"),
    (re.compile(r"(tools\[\d+\])\.function"), r"\1"),
    (re.compile(r"tool_choice\.function"), "tool_choice"),
    (re.compile(r"reasoning_effort"), "output_config.effort"),
    (re.compile(r"stop\Z"), "stop_sequences"),
)
EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


class Tool(WireModel):
    """A custom tool, or one that its type names: a client's whose input is known, or one that does not run here."""

    hints: ClassVar = frozenset({
        "cache_control", "input_examples", "allowed_callers", "defer_loading", "eager_input_streaming",
        "max_characters",
    })  # fmt: skip

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def is_dropped(self) -> bool:
        return self.type not in (None, "custom") and client_tool(self.type, self.name) is None

    def for_chat(self, path: str) -> dict[str, Any]:
        """As chat spells it. Raises InvalidRequest."""
        if self.type not in (None, "custom"):
            function = client_tool(self.type, self.name)
            return {"type": self.type} if function is None else {"type": "function", "function": function}
        if not self.name:
            raise InvalidRequest(f"{path}.name must be a name of the tool.", param=f"{path}.name")
        if self.input_schema is None:
            told = f"{path}.input_schema must be an object: the JSON schema of the tool's input."
            raise InvalidRequest(told, param=f"{path}.input_schema")
        function = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            function["description"] = self.description
        if self.strict is not None:
            function["strict"] = self.strict
        return {"type": "function", "function": function}


class ToolChoice(WireModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(WireModel):
    """display "omitted": thinking blocks are empty, and their signature holds what they said."""

    hints: ClassVar = frozenset({"block_binding", "budget_tokens"})

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    display: Literal["summarized", "omitted"] | None = None


class OutputConfig(WireModel):
    hints: ClassVar = frozenset({"task_budget"})
    shapes: ClassVar = {"format": FORMAT}

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: dict[str, Any] | None = None


class MessagesRequest(WireModel):
    """Body of both routes. None: absent or null. Fields of type Any are checked where they are translated."""

    hints: ClassVar = frozenset({
        "metadata", "service_tier", "cache_control", "container", "context_management", "mcp_servers", "inference_geo",
        "speed", "diagnostics", "user_profile_id", "workspace_id", "betas", "billing_policy", "fallbacks",
        "fallback_credit_token",
    })  # fmt: skip
    shapes: ClassVar = {"messages": MESSAGES, "system": SYSTEM, "output_format": FORMAT}

    messages: Annotated[list[Any], at_most("messages")]
    system: Any = None
    max_tokens: int | None = None
    stop_sequences: Annotated[tuple[str, ...], BeforeValidator(stop_list)] = ()
    tools: Annotated[list[Tool] | None, FailFast(), at_most("tools")] = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None
    compaction: Any = None
    thread: Any = None
    model: Any = None
    stream: Any = None
    temperature: Any = None
    top_p: Any = None
    top_k: Any = None
    min_p: Any = None
    seed: Any = None
    min_tokens: Any = None
    ignore_eos: Any = None
    stop_token_ids: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logit_bias: Any = None
    cache_salt: Any = None
    timeout: Any = None
    priority: Any = None
    chat_template_kwargs: Any = None

    def check_max_tokens(self) -> int:
        """Raises InvalidRequest: generating needs a limit, counting does not."""
        if self.max_tokens is None:
            raise missing("max_tokens")
        if self.max_tokens < 0:
            raise InvalidRequest(f"max_tokens must be at least 0, got {self.max_tokens}.", param="max_tokens")
        return self.max_tokens

    def for_chat(self, ignored: Ignored, *, late_system: bool) -> ChatRequest:
        """The chat request that asks the same, without a limit of tokens. ignored: gets the names of what was left
        out of the messages. late_system: see `chat_messages`. Raises InvalidRequest."""
        if not self.messages:
            raise InvalidRequest("messages must not be empty.", param="messages")
        for param, told in REFUSED.items():
            if getattr(self, param) is not None:
                raise InvalidRequest(told, param=param)
        chat = {name: value for name in SHARED if (value := getattr(self, name)) is not None}
        chat["messages"] = chat_messages(self.messages, self.system, ignored, late_system=late_system)
        chat["stop"] = list(self.stop_sequences)
        last = chat["messages"][-1]
        if last["role"] == "assistant":
            if "tool_calls" in last:
                told = "messages must not end with a tool_use block: its tool_result must follow."
                raise InvalidRequest(told, param="messages")
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        chat |= self._tools_for_chat() | self._format_for_chat() | self._thinking_for_chat()
        try:
            request = check_fields(chat, ChatRequest)
            request.check()
        except InvalidRequest as error:
            raise self.in_our_words(error) from None
        return request

    def in_our_words(self, error: ApiError) -> ApiError:
        """An error about a field of the chat request, about the field that it came from."""
        return retold(error, (*_PARAMS, (_FORMAT_PARAM, self._format[0])))

    def _tools_for_chat(self) -> dict[str, Any]:
        chat: dict[str, Any] = {}
        if self.tools:
            self._check_names(self.tools)
            chat["tools"] = [tool.for_chat(f"tools[{index}]") for index, tool in enumerate(self.tools)]
        choice = self.tool_choice
        if choice is None:
            return chat
        self._check_choice(choice)
        named = {"type": "function", "function": {"name": choice.name}}
        chat["tool_choice"] = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        if choice.disable_parallel_tool_use:
            chat["parallel_tool_calls"] = False
        return chat

    @staticmethod
    def _check_names(tools: Sequence[Tool]) -> None:
        names: set[str | None] = set()
        for index, tool in enumerate(tools):
            if tool.name is not None and tool.name in names:
                told = f"tools[{index}].name is that of an earlier tool: {short(tool.name)}."
                raise InvalidRequest(told, param=f"tools[{index}].name")
            names.add(tool.name)

    def _check_choice(self, choice: ToolChoice) -> None:
        """Whether there is a tool that it can mean. Raises InvalidRequest."""
        dropped = [tool for tool in self.tools or () if tool.is_dropped]
        if choice.type == "tool":
            if not choice.name:
                raise InvalidRequest("tool_choice.name must be the name of a tool.", param="tool_choice.name")
            if any(tool.name == choice.name for tool in dropped):
                told = f"tool_choice.name is that of a tool which this server cannot run: {short(choice.name)}."
                raise InvalidRequest(told, param="tool_choice.name", code="unsupported_tool")
        if choice.type == "any" and len(dropped) == len(self.tools or ()):
            why = f", and this server cannot run {short(dropped[0].type)}" if dropped else ""
            raise InvalidRequest(f'tool_choice "any" needs a tool{why}.', param="tool_choice")

    @property
    def _format(self) -> tuple[str, dict[str, Any] | None]:
        """(path, value) of the form that is asked for."""
        if self.output_config is not None and self.output_config.format is not None:
            return "output_config.format", self.output_config.format
        return "output_format", self.output_format

    def _format_for_chat(self) -> dict[str, Any]:
        path, wanted = self._format
        if wanted is None:
            return {}
        if wanted.get("type") != "json_schema":
            told = f'{path}.type must be "json_schema", got {short(wanted.get("type"))}.'
            raise InvalidRequest(told, param=f"{path}.type")
        if not isinstance(wanted.get("schema"), dict):
            raise InvalidRequest(f"{path}.schema must be an object.", param=f"{path}.schema")
        schema = {"name": "output", "schema": wanted["schema"], "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _thinking_for_chat(self) -> dict[str, Any]:
        """Whether to think, and how hard, as far as the model's template has words for it."""
        chat: dict[str, Any] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            chat["reasoning_effort"] = EFFORTS[self.output_config.effort]
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
            given = self.chat_template_kwargs
            if given is None or isinstance(given, dict):  # else chat says what is wrong with it
                chat["chat_template_kwargs"] = {"enable_thinking": thinks, "thinking": thinks} | (given or {})
        return chat
