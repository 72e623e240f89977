"""From a chat request to what the engine needs and how its text is to be read. Chat is the common language of the
conversational routes: the others translate their bodies into a `ChatRequest` and come through here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from starlette.requests import Request

from engine.sampling_params import SamplingParams
from engine.text import StopGate
from server.chat_template import TemplateInput
from server.front import Front
from server.protocol.chat import ChatRequest
from server.protocol.chat_tools import ToolPlan, plan
from server.protocol.conversation_writer import NewParser
from server.protocol.structured import structured_output
from server.protocol.tool_forms import ToolForms
from server.tool_prompt import with_tools


@dataclass(frozen=True, slots=True)
class Conversation:
    """prompt: token ids. params.reasoning marks the thinking to expect, if any.

    new_parser: one parser per choice; None where all text is content. custom_tools: names of tools whose calls are
    free text. ignored: what was left out of the request, for `Front.ignored`. new_stop_gate, forms: for
    `Front.generate`."""

    prompt: list[int]
    params: SamplingParams
    new_parser: NewParser | None = None
    custom_tools: frozenset[str] = frozenset()
    ignored: tuple[str, ...] = ()
    new_stop_gate: Callable[[], StopGate] | None = None
    forms: ToolForms = field(default_factory=ToolForms)


async def prepare(
    front: Front, request: Request, body: ChatRequest, *, least_output: int | None = 1
) -> Conversation:  # fmt: skip
    """body: after `ChatRequest.check`. least_output: tokens that must fit beside the prompt; None: its length is not
    checked. A limit beyond what remains of the context is cut to it, not refused: a limit is an upper bound, and
    agents ask for 32,000 tokens whatever the model.

    Raises InvalidRequest and InvalidParameter, with `param` as chat spells it."""
    return await front.in_turn(request, _prepare, front, body, least_output)


def _prepare(front: Front, body: ChatRequest, least_output: int | None) -> Conversation:
    front.check_logprobs(body.top_logprobs, "top_logprobs")
    front.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    max_tokens = body.output_limit
    params = body.sampling_params(front.info.sampling_defaults, max_tokens=max_tokens, logprobs=body.num_alternatives)
    params.check_vocabulary(front.info.vocab_size)
    structured = structured_output(body)
    has_form = structured is not None
    tools = plan(body.tools, body.tool_choice, parallel=body.parallel_tool_calls, has_form=has_form)
    given = template_input(body, tools, tells_tools=front.reader.tells_tools)
    encoded = front.encoder.conversation(given, least_output)
    if body.prompt_logprobs is not None:
        front.check_prompt_logprobs(len(encoded.token_ids), body.prompt_logprobs)
        params = replace(params, prompt_logprobs=body.prompt_logprobs)
    if least_output is not None and max_tokens is not None:
        params = replace(params, max_tokens=min(max_tokens, front.info.max_model_len - len(encoded.token_ids)))
    continued = body.messages[-1].text if body.continue_final_message else None
    reading = front.reader.read(tools, structured, encoded.tail, continued)
    params = replace(
        params, reasoning=reading.reasoning, structured=reading.structured, shown_special_tokens=reading.shown
    )
    if tools.forced:  # there is nothing but calls, and whoever stops one gets what no client can read
        params = replace(params, stop=(), stop_token_ids=())
    return Conversation(
        encoded.token_ids, params, reading.new_parser, tools.custom, tools.ignored, reading.new_stop_gate,
        reading.forms,
    )  # fmt: skip


def template_input(body: ChatRequest, tools: ToolPlan, *, tells_tools: bool) -> TemplateInput:
    """What the model's chat template is given. tells_tools: it knows no tools, so the messages tell of them."""
    messages = [message.for_template() for message in body.messages]
    has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
    told = tells_tools and (bool(tools.tools) or has_calls)
    continued = bool(body.continue_final_message)
    return TemplateInput(
        with_tools(messages, tools.tools) if told else messages,
        None if told else tools.tools or None,
        _variables(body),
        add_generation_prompt=not continued and body.add_generation_prompt is not False,
        continue_final_message=continued,
    )


def _variables(body: ChatRequest) -> dict[str, Any]:
    """Templates have several words for the same switch; those that one does not know, it does not look at."""
    variables: dict[str, Any] = {}
    if body.reasoning_effort is not None:
        thinks = body.reasoning_effort != "none"
        variables = {"reasoning_effort": body.reasoning_effort, "enable_thinking": thinks, "thinking": thinks}
    given = body.chat_template_kwargs or {}
    return variables | {name: value for name, value in given.items() if value is not None}
