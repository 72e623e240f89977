"""POST /v1/completions."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from server.front import front_of, read
from server.protocol.answers import CompletionWriter
from server.protocol.completions import DEFAULT_MAX_TOKENS, CompletionRequest

router = APIRouter()


@router.post("/v1/completions")
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    front = front_of(request)
    body = await read(request, CompletionRequest, CompletionRequest.check)
    model = front.check_model(body.model)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = body.sampling_params(front.info.sampling_defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    params.check_vocabulary(front.info.vocab_size)
    prompts = await asyncio.to_thread(front.encoder.prompts, body.prompt, max_tokens)
    echo = [p if isinstance(p, str) else front.tokenizer.decode(p) for p in body.prompt] if body.echo else ()
    writer = CompletionWriter(
        front.tokenizer,
        model=model,
        fingerprint=front.info.system_fingerprint,
        logprobs=body.logprobs is not None,
        include_usage=body.include_usage,
    )
    return await front.generate(request, body, prompts, params, writer, echo=echo)
