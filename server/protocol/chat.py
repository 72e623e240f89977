"""The wire type of /v1/chat/completions. Messages and tools have files of their own."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import FailFast

from server.protocol.chat_messages import FEW_PARTS, Message
from server.protocol.chat_tools import TOOL_CHOICE, Tool
from server.protocol.common import GenerationRequest
from server.protocol.errors import InvalidRequest
from server.protocol.parsing import at_most

MAX_MODALITIES = 16
MAX_EFFORT_CHARS = 32
# what the template is given by ourselves, and what would be another template
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)


class ChatRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    hints: ClassVar = GenerationRequest.hints | {
        "audio", "function_call", "metadata", "prediction", "service_tier", "store", "verbosity", "web_search_options",
    }  # fmt: skip
    shapes: ClassVar = {**GenerationRequest.shapes, "tool_choice": TOOL_CHOICE}

    messages: Annotated[list[Message], FailFast(), FEW_PARTS, at_most("messages")]
    max_completion_tokens: int | None = None
    best_of: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[Tool] | None, FailFast(), at_most("tools")] = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: Annotated[list[dict[str, Any]] | None, at_most("tools")] = None
    function_call: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    modalities: Annotated[list[str], at_most(MAX_MODALITIES)] | None = None
    moderation: Any = None

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
        self._check_template()
        self._check_logprobs()
        self._check_not_offered()
        if self.best_of is not None and not self.use_beam_search:
            raise InvalidRequest("best_of needs use_beam_search to be true.", param="best_of")
        if self.stream and self.prompt_logprobs is not None:
            told = "prompt_logprobs is not available when stream is true."
            raise InvalidRequest(told, param="prompt_logprobs")
        for param in ("max_tokens", "max_completion_tokens"):
            limit = getattr(self, param)
            if limit is not None and limit < 1:
                raise InvalidRequest(f"{param} must be at least 1, got {limit}.", param=param)

    def _check_messages(self) -> None:
        if not self.messages:
            raise InvalidRequest("messages must not be empty.", param="messages")
        for index, message in enumerate(self.messages):
            if not message.is_complete:
                param = f"messages[{index}].content"
                raise InvalidRequest(f"{param} must be a string or an array of text parts.", param=param)

    def _check_template(self) -> None:
        if self.chat_template is not None:
            told = "chat_template is not accepted: the model's own template is used. See chat_template_kwargs."
            raise InvalidRequest(told, param="chat_template")
        if self.reasoning_effort is not None and not 0 < len(self.reasoning_effort) <= MAX_EFFORT_CHARS:
            told = f"reasoning_effort must have 1 to {MAX_EFFORT_CHARS} characters."
            raise InvalidRequest(told, param="reasoning_effort")
        for name in self.chat_template_kwargs or ():
            if name in RESERVED_VARIABLES:
                param = f"chat_template_kwargs.{name}"
                raise InvalidRequest(f"{param} cannot be given: it is the server's to set.", param=param)
        if not self.continue_final_message:
            return
        if self.add_generation_prompt:
            told = "continue_final_message and add_generation_prompt cannot both be true."
            raise InvalidRequest(told, param="continue_final_message")
        if self.messages[-1].role != "assistant":
            told = "continue_final_message needs a last message of the assistant."
            raise InvalidRequest(told, param="continue_final_message")

    def _check_logprobs(self) -> None:
        top = self.top_logprobs
        if top is None:
            return
        if not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true.", param="top_logprobs")

    def _check_not_offered(self) -> None:
        if self.functions:
            raise InvalidRequest("functions are not supported; they were replaced by tools.", param="functions")
        if self.function_call not in (None, "none", "auto"):
            raise InvalidRequest("function_call is not supported; use tool_choice.", param="function_call")
        if self.moderation is not None:
            raise InvalidRequest("moderation is not supported.", param="moderation")
        if self.modalities is not None and self.modalities != ["text"]:
            raise InvalidRequest('modalities must be ["text"]: this model writes text.', param="modalities")
