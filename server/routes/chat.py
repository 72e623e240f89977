"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.conversation import prepare
from server.front import front_of, read
from server.openapi import takes
from server.protocol.chat import ChatRequest
from server.protocol.chat_writer import ChatWriter
from server.shown_prompt import ShownPrompt

REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}

router = APIRouter()


@router.post("/v1/chat/completions", openapi_extra=takes(ChatRequest, streams=True))
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation through the model's chat template."""
    front = front_of(request)
    body = await read(request, ChatRequest, ChatRequest.check)
    model = front.check_model(body.model)
    conversation = await prepare(front, request, body)
    front.ignored.note(request, conversation.ignored)
    scored = None
    if body.prompt_logprobs is not None:
        scored = ShownPrompt(front.tokenizer, conversation.prompt, "", echo=False, num_echoed=None)
    writer = ChatWriter(
        front.tokenizer,
        model=model,
        fingerprint=front.info.system_fingerprint,
        logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
        new_parser=conversation.new_parser,
        reasoning=conversation.params.reasoning,
        reasoning_fields=REASONING_FIELDS[front.settings.reasoning_field],
        custom_tools=conversation.custom_tools,
        prompt_ids=conversation.prompt if body.return_token_ids else None,
        prompt_logprobs=None if scored is None else (scored, body.prompt_logprobs or 0),
    )
    shown = [] if scored is None else [scored]
    return await front.generate(
        request, body, [conversation.prompt], conversation.params, writer, shown=shown,
        new_stop_gate=conversation.new_stop_gate, forms=conversation.forms,
    )  # fmt: skip
