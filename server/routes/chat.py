"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.conversation import prepare
from server.front import front_of, read
from server.protocol.chat import ChatRequest
from server.protocol.chat_writer import ChatWriter

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation through the model's chat template."""
    front = front_of(request)
    body = await read(request, ChatRequest, ChatRequest.check)
    model = front.check_model(body.model)
    conversation = await prepare(front, body)
    writer = ChatWriter(
        front.tokenizer,
        model=model,
        fingerprint=front.info.system_fingerprint,
        logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
        new_parser=conversation.new_parser,
        reasoning=conversation.params.reasoning,
    )
    return await front.generate(request, body, [conversation.prompt], conversation.params, writer)
