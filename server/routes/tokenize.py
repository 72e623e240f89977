"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer, without the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.conversation import prepare
from server.front import Front, front_of, read
from server.openapi import takes
from server.protocol.logprobs import token_text
from server.protocol.tokenize import DetokenizeRequest, TokenizeRequest

NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
TOKENIZER_CLASS = "PreTrainedTokenizerFast"  # what in transformers reads every file that we read

router = APIRouter()


@router.post("/tokenize", openapi_extra=takes(TokenizeRequest))
async def tokenize(request: Request) -> Response:
    """{"prompt"} or {"messages"} -> {"tokens", "count", "max_model_len", "token_strs"}, as /v1/completions would read
    the prompt, or /v1/chat/completions the messages; too long ones too."""
    front = front_of(request)
    body = await read(request, TokenizeRequest)
    front.check_model(body.model)
    body.check()
    if body.prompt is not None:
        add_special = body.add_special_tokens is not False
        tokens = await front.in_turn(request, front.encoder.text, body.prompt, add_special_tokens=add_special)
    else:
        conversation = await prepare(front, request, body.for_chat(), least_output=None)
        front.ignored.note(request, conversation.ignored)
        tokens = conversation.prompt
    return Response(
        await front.in_turn(request, _answer, front, tokens, with_texts=bool(body.return_token_strs)),
        media_type="application/json",
    )


def _answer(front: Front, tokens: Sequence[int], *, with_texts: bool) -> bytes:
    texts = [token_text(front.tokenizer, token_id) for token_id in tokens] if with_texts else None
    counts = {"count": len(tokens), "max_model_len": front.info.max_model_len}
    return orjson.dumps({"tokens": tokens, "token_strs": texts} | counts)


@router.post("/detokenize", openapi_extra=takes(DetokenizeRequest))
async def detokenize(request: Request) -> Response:
    """{"tokens"} -> {"prompt"}; ids outside the vocabulary are refused, as /v1/completions refuses them."""
    front = front_of(request)
    body = await read(request, DetokenizeRequest)
    front.check_model(body.model)
    await front.in_turn(request, front.encoder.check_ids, body.tokens, "tokens")
    skip = body.skip_special_tokens is True
    text = await front.in_turn(request, front.tokenizer.decode, body.tokens, skip_special_tokens=skip)
    return Response(orjson.dumps({"prompt": text}), media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """What a client needs to render and count prompts itself, in the words of a tokenizer_config.json."""
    front = front_of(request)
    tokenizer = front.tokenizer
    facts: dict[str, Any] = {
        "tokenizer_class": TOKENIZER_CLASS,
        "chat_template": tokenizer.chat_template,
        "model_max_length": front.info.max_model_len,
        "vocab_size": front.info.vocab_size,
    }
    facts |= {name: tokenizer.special_tokens.get(name) for name in NAMED_TOKENS}
    facts |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_ids": tokenizer.eos_token_ids}
    return Response(orjson.dumps(facts), media_type="application/json")
