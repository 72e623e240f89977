"""POST /tokenize and /detokenize: the model's tokenizer, without the model."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Request, Response

from server.front import front_of, read
from server.openapi import takes
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

router = APIRouter()


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """{"prompt"} -> {"tokens", "count", "max_model_len"}, as /v1/completions would read the prompt."""
    front = front_of(request)
    body = await read(request, TokenizeRequest)
    front.check_model(body.model)
    add_special = body.add_special_tokens is not False
    tokens = await asyncio.to_thread(front.encoder.text, body.prompt, add_special_tokens=add_special)
    answer = {"tokens": tokens, "count": len(tokens), "max_model_len": front.info.max_model_len}
    return Response(orjson.dumps(answer), media_type="application/json")


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """{"tokens"} -> {"prompt"}; ids outside the vocabulary are refused, as /v1/completions refuses them."""
    front = front_of(request)
    body = await read(request, DetokenizeRequest)
    front.check_model(body.model)
    await asyncio.to_thread(front.encoder.check_ids, body.tokens, "tokens")
    skip = body.skip_special_tokens is True
    text = await asyncio.to_thread(front.tokenizer.decode, body.tokens, skip_special_tokens=skip)
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")
