"""Request text to token ids, in a worker thread: nothing here may run on the event loop.

Lengths are checked twice: by characters before tokenising (a text cannot have fewer tokens than its characters over
those of the longest token), so that a huge text costs nothing, and by tokens after.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from engine.outputs import ModelInfo
from engine.tokenizer import Tokenizer
from server.chat_template import ChatTemplate, ChatTemplateError, Encoded, TemplateInput
from server.protocol.errors import InvalidRequest

SHORTEST_LONGEST_TOKEN = 16  # characters; a floor for vocabularies of odd shape


class PromptEncoder:
    """For one model; safe to use from several threads.

    Every method raises InvalidRequest, with code "context_length_exceeded" for what is too long."""

    def __init__(self, tokenizer: Tokenizer, info: ModelInfo) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = info.vocab_size
        self._max_model_len = info.max_model_len

    def prompts(self, prompts: Sequence[str | tuple[int, ...]], num_output: int) -> list[Sequence[int]]:
        """Token ids of each prompt. num_output: tokens asked for, which must fit beside it."""
        encoded: list[Sequence[int]] = []
        for index, prompt in enumerate(prompts):
            param = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
            token_ids = self.text(prompt, param=param) if isinstance(prompt, str) else prompt
            if not isinstance(prompt, str):
                self.check_ids(token_ids, param)
            if not token_ids:
                raise InvalidRequest(f"{param} is empty: it must hold at least one token.", param=param)
            self._check_length(len(token_ids), num_output, param, "prompt")
            encoded.append(token_ids)
        return encoded

    def inputs(
        self, inputs: Sequence[str | tuple[int, ...]], *, add_special_tokens: bool = True
    ) -> list[Sequence[int]]:
        """Token ids of each text to embed; nothing has to fit beside it."""
        encoded: list[Sequence[int]] = []
        for index, given in enumerate(inputs):
            param = "input" if len(inputs) == 1 else f"input[{index}]"
            if isinstance(given, str):
                token_ids: Sequence[int] = self.text(given, add_special_tokens=add_special_tokens, param=param)
            else:
                self.check_ids(given, param)
                token_ids = given
            if not token_ids or not given:
                raise InvalidRequest(f"{param} is empty: it must hold at least one token.", param=param)
            self._check_length(len(token_ids), 0, param, "input")
            encoded.append(token_ids)
        return encoded

    def conversation(self, given: TemplateInput, num_output: int | None) -> Encoded:
        """Token ids of a conversation through the model's chat template. num_output: tokens that must fit beside it;
        None: its length is not checked."""
        template = self._tool_template if given.tools else self._chat_template
        try:
            encoded = template.encode(given, lambda count: self._check_characters(count, "messages"))
        except ChatTemplateError as error:
            raise InvalidRequest(str(error), param="messages", code="invalid_messages") from None
        if not encoded.token_ids:
            raise InvalidRequest("The chat template makes an empty prompt of these messages.", param="messages")
        if num_output is not None:
            self._check_length(len(encoded.token_ids), num_output, "messages", "messages")
        return encoded

    @cached_property
    def takes_late_system(self) -> bool:
        """Whether the chat template tells a system message that comes after the conversation has begun; some refuse
        it, some leave it out. Raises InvalidRequest where there is no template."""
        roles, said = ("user", "system", "user"), ("first word", "late word", "last word")
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=True)]
        try:
            rendered = self._chat_template.render(TemplateInput(messages))
        except ChatTemplateError:
            return False
        return all(text in rendered for text in said)

    def text(self, text: str, *, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Control tokens spelled in a raw prompt are recognised, as elsewhere: whoever sends one writes the format."""
        self._check_characters(len(text), param)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, allow_special=True)

    def check_ids(self, token_ids: Sequence[int], param: str) -> None:
        """Every id is one of the model's."""
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self._vocab_size:
            odd = low if low < 0 else high
            raise InvalidRequest(
                f"{param} has token id {odd}, outside the vocabulary of {self._vocab_size} tokens.", param=param
            )

    @cached_property
    def _chat_template(self) -> ChatTemplate:
        return self._template(self._tokenizer.chat_template)

    @cached_property
    def _tool_template(self) -> ChatTemplate:
        """Some models bring a second template for conversations with tools."""
        source = self._tokenizer.chat_templates.get("tool_use")
        return self._chat_template if source is None else self._template(source)

    def _template(self, source: str | None) -> ChatTemplate:
        if source is None:
            raise InvalidRequest("This model has no chat template: use /v1/completions.", code="no_chat_template")
        try:
            return ChatTemplate(source, self._tokenizer, self._tokenizer.control_texts)
        except ChatTemplateError as error:
            raise InvalidRequest(str(error), code="no_chat_template") from None

    @cached_property
    def _max_characters(self) -> int:
        longest = max(len(self._tokenizer.token_bytes(token_id)) for token_id in range(self._vocab_size))
        return self._max_model_len * max(longest, SHORTEST_LONGEST_TOKEN)

    def _check_characters(self, count: int, param: str) -> None:
        # the vocabulary is only measured for a text that could be too long
        if count > self._max_model_len * SHORTEST_LONGEST_TOKEN and count > self._max_characters:
            raise InvalidRequest(
                f"This model's maximum context length is {self._max_model_len} tokens. However, your {param} has "
                f"{count} characters, which is more than can fit. Please reduce its length.",
                param=param,
                code="context_length_exceeded",
            )

    def _check_length(self, num_prompt: int, num_output: int, param: str, noun: str) -> None:
        total = num_prompt + num_output
        if total > self._max_model_len:
            raise InvalidRequest(
                f"This model's maximum context length is {self._max_model_len} tokens. However, you requested "
                f"{total} tokens ({num_prompt} in the {noun}, {num_output} in the completion). Please reduce the "
                f"length of the {noun} or completion.",
                param=param,
                code="context_length_exceeded",
            )
