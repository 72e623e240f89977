"""From a chat request to what the engine needs and how its text is to be read. Chat is the common language of the
conversational routes: the others translate their bodies into a `ChatRequest` and come through here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from engine.sampling_params import SamplingParams
from server.chat_template import TemplateInput
from server.front import Front
from server.protocol.chat import ChatRequest
from server.protocol.conversation_writer import NewParser


@dataclass(frozen=True, slots=True)
class Conversation:
    """prompt: token ids. params.reasoning marks the thinking to expect, if any.

    new_parser: one parser per choice; None where all text is content."""

    prompt: list[int]
    params: SamplingParams
    new_parser: NewParser | None = None


async def prepare(front: Front, body: ChatRequest) -> Conversation:
    """body: after `ChatRequest.check`.

    Raises InvalidRequest and InvalidParameter, with `param` as chat spells it."""
    max_tokens = body.output_limit
    params = body.sampling_params(front.info.sampling_defaults, max_tokens=max_tokens, logprobs=body.num_alternatives)
    params.check_vocabulary(front.info.vocab_size)
    messages = [message.for_template() for message in body.messages]
    given = TemplateInput(messages)
    encoded = await asyncio.to_thread(front.encoder.conversation, given, max_tokens or 1)
    return Conversation(encoded.token_ids, params)
