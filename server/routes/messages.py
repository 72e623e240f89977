"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same pipeline as chat."""

from __future__ import annotations

from dataclasses import replace

import orjson
from fastapi import APIRouter, Request, Response

from engine.sampling_params import InvalidParameter
from server.conversation import Conversation, prepare
from server.front import Front, front_of, read
from server.openapi import takes
from server.protocol.chat import ChatRequest
from server.protocol.errors import ApiError, InvalidRequest, to_api_error
from server.protocol.messages import MessagesRequest
from server.protocol.messages_writer import MessagesWriter

router = APIRouter()


@router.post("/v1/messages", openapi_extra=takes(MessagesRequest, streams=True))
async def create_message(request: Request) -> Response:
    """Go on with a conversation. What does not fit beside the prompt is cut by the context, not refused."""
    front = front_of(request)
    body, chat = await _read(request, front)
    try:
        return await _answer(request, front, body, chat)
    except (ApiError, InvalidParameter) as error:
        raise body.in_our_words(to_api_error(error)) from None


async def _answer(request: Request, front: Front, body: MessagesRequest, chat: ChatRequest) -> Response:
    """Raises ApiError and InvalidParameter, in chat's words."""
    max_tokens = body.check_max_tokens()
    model = front.check_model(chat.model)
    conversation = await _prepare(front, request, chat)
    front.ignored.note(request, conversation.ignored)
    remaining = front.info.max_model_len - len(conversation.prompt)
    params = replace(conversation.params, max_tokens=min(max_tokens, remaining))
    writer = MessagesWriter(
        front.tokenizer,
        model=model,
        max_tokens=max_tokens,
        request_id=request.scope.get("state", {}).get("request_id"),
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        new_parser=conversation.new_parser,
        reasoning=params.reasoning,
    )
    return await front.generate(
        request, chat, [conversation.prompt], params, writer, new_stop_gate=conversation.new_stop_gate,
        forms=conversation.forms,
    )  # fmt: skip


@router.post("/v1/messages/count_tokens", openapi_extra=takes(MessagesRequest))
async def count_tokens(request: Request) -> Response:
    """{"input_tokens"}: what the prompt of the same POST /v1/messages would have, also where that is too long."""
    front = front_of(request)
    body, chat = await _read(request, front)
    front.check_model(chat.model)
    try:
        conversation = await prepare(front, request, chat, least_output=None)
    except (ApiError, InvalidParameter) as error:
        raise body.in_our_words(to_api_error(error)) from None
    front.ignored.note(request, conversation.ignored)
    return Response(orjson.dumps({"input_tokens": len(conversation.prompt)}), media_type="application/json")


async def _read(request: Request, front: Front) -> tuple[MessagesRequest, ChatRequest]:
    ignored: set[str] = set()
    chat: list[ChatRequest] = []

    def translate(body: MessagesRequest) -> None:
        late_system = front.encoder.takes_late_system  # found out once, by a few words
        chat.append(body.for_chat(ignored, late_system=late_system))

    body = await read(request, MessagesRequest, translate)
    front.ignored.note(request, sorted(ignored))
    return body, chat[0]


async def _prepare(front: Front, request: Request, chat: ChatRequest) -> Conversation:
    """Raises InvalidRequest that begins with "prompt is too long": clients look for it to shorten the conversation."""
    try:
        conversation = await prepare(front, request, chat, least_output=None)
    except InvalidRequest as error:
        if error.code != "context_length_exceeded":
            raise
        raise InvalidRequest(f"prompt is too long: {error.message}", code=error.code) from None
    count, most = len(conversation.prompt), front.info.max_model_len - 1
    if count > most:
        told = f"prompt is too long: {count} tokens > {most} maximum"
        raise InvalidRequest(told, param="messages", code="context_length_exceeded")
    return conversation
