"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from server.front import front_of, read
from server.protocol.answers import ChatWriter
from server.protocol.chat import ChatRequest

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    """Continue a conversation through the model's chat template."""
    front = front_of(request)
    body = await read(request, ChatRequest, ChatRequest.check)
    model = front.check_model(body.model)
    max_tokens = body.output_limit
    params = body.sampling_params(front.info.sampling_defaults, max_tokens=max_tokens, logprobs=body.num_alternatives)
    params.check_vocabulary(front.info.vocab_size)
    messages = [message.for_template() for message in body.messages]
    prompt = await asyncio.to_thread(front.encoder.messages, messages, max_tokens or 1)
    writer = ChatWriter(
        front.tokenizer,
        model=model,
        fingerprint=front.info.system_fingerprint,
        logprobs=bool(body.logprobs),
        include_usage=body.include_usage,
    )
    return await front.generate(request, body, [prompt], params, writer)
