"""The wire types of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast

from server.protocol.chat import ChatRequest
from server.protocol.chat_messages import FEW_PARTS, Message
from server.protocol.chat_tools import Tool
from server.protocol.errors import InvalidRequest
from server.protocol.fields import WireModel
from server.protocol.parsing import at_most, check_fields

CHAT_FIELDS = (
    "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
)  # fmt: skip


class TokenizeRequest(WireModel):
    """Body of POST /tokenize: a prompt, as completions would read it, or messages, as chat would.

    add_special_tokens: those around a prompt (BOS) are added unless refused. return_token_strs: the text of each
    token too."""

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: Annotated[list[Message] | None, FailFast(), FEW_PARTS, at_most("messages")] = None
    tools: Annotated[list[Tool] | None, FailFast(), at_most("tools")] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def check(self) -> None:
        """Raises InvalidRequest for both kinds of input, for none, and for fields of the other kind."""
        if self.messages is None:
            if self.prompt is None:
                told = "You must provide the parameter prompt, or messages."
                raise InvalidRequest(told, param="prompt", code="missing_required_parameter")
            if other := next((name for name in CHAT_FIELDS if getattr(self, name) is not None), None):
                raise InvalidRequest(f"{other} needs messages in place of a prompt.", param=other)
        elif self.prompt is not None:
            raise InvalidRequest("prompt cannot be combined with messages.", param="prompt")
        elif self.add_special_tokens:
            told = "add_special_tokens cannot be true with messages: the chat template writes what belongs there."
            raise InvalidRequest(told, param="add_special_tokens")
        else:
            self.for_chat()

    def for_chat(self) -> ChatRequest:
        """The chat request with this prompt. Raises InvalidRequest."""
        chat = check_fields({name: getattr(self, name) for name in CHAT_FIELDS}, ChatRequest)
        chat.check()
        return chat


class DetokenizeRequest(WireModel):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]
    skip_special_tokens: bool | None = None
