"""POST /v1/responses, and what became of earlier ones: GET, DELETE, cancel, input_items; and input_tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from engine.sampling_params import InvalidParameter
from server.conversation import Conversation, prepare
from server.front import Front, front_of, read
from server.openapi import takes
from server.protocol.errors import ApiError, InvalidRequest, to_api_error
from server.protocol.parsing import short
from server.protocol.response_items import Item, Reader, cut, cuts, references
from server.protocol.response_tools import MAX_TOOLS, Tools
from server.protocol.responses import ResponsesRequest, echo, in_our_words
from server.protocol.responses_writer import Keep, ResponsesWriter
from server.response_store import Kept, KeptItem, ResponseStore, Shelf, StoredResponse

router = APIRouter()

MAX_PAGE = 100
DEFAULT_PAGE = 20
PAGE_PARAMETERS = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "An item's id."},
]


@dataclass(frozen=True, slots=True)
class Given:
    """A request's conversation. items: all of it; own: what this request brought; chosen: the ids of it that are the
    client's own. dropped: what cannot be used."""

    items: list[Item]
    own: list[Item]
    chosen: set[str]
    previous: StoredResponse | None
    tools: Tools
    dropped: list[str]


@router.post("/v1/responses", openapi_extra=takes(ResponsesRequest, streams=True))
async def create_response(request: Request) -> Response:
    """Answer an input, or continue an earlier response."""
    front = front_of(request)
    body = await read(request, ResponsesRequest, ResponsesRequest.check)
    model = front.check_model(body.model)
    given = await asyncio.to_thread(_gather, body, _shelf_of(request), front)
    front.ignored.note(request, given.dropped)
    try:
        conversation = await _fit(front, body, given)
        params = conversation.params
        said = await asyncio.to_thread(
            echo, body, given.tools, temperature=params.temperature, top_p=params.top_p
        )  # fmt: skip
        writer = ResponsesWriter(
            front.tokenizer,
            model=model,
            echo=said,
            tools=given.tools,
            logprobs=body.wants_logprobs,
            sealed=body.wants_sealed,
            keep=await asyncio.to_thread(_keeper, _shelf_of(request), given) if body.stored else None,
            new_parser=conversation.new_parser,
            reasoning=params.reasoning,
        )
        return await front.generate(
            request, body, [conversation.prompt], params, writer, new_stop_gate=conversation.new_stop_gate
        )
    except (ApiError, InvalidParameter) as error:
        raise in_our_words(to_api_error(error)) from None


@router.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """{"input_tokens"} of a body as POST /v1/responses would take it, without an answer; also of one that is too
    long, unless its oldest turns would be left out."""
    front = front_of(request)
    body = await read(request, ResponsesRequest, ResponsesRequest.check)
    front.check_model(body.model)
    given = await asyncio.to_thread(_gather, body, _shelf_of(request), front)
    front.ignored.note(request, given.dropped)
    try:
        conversation = await _fit(front, body, given, must_fit=body.truncation == "auto")
    except (ApiError, InvalidParameter) as error:
        raise in_our_words(to_api_error(error)) from None
    return _json({"object": "response.input_tokens", "input_tokens": len(conversation.prompt)})


def _gather(body: ResponsesRequest, shelf: Shelf, front: Front) -> Given:
    """What is stored counts before it is read: a small body cannot ask for more than a large one could bring.

    Raises InvalidRequest, ApiError 404."""
    previous = None
    if body.previous_response_id is not None:
        previous = shelf.get(body.previous_response_id)
        if previous is None:
            told = f"Previous response with id {short(body.previous_response_id)} not found."
            raise InvalidRequest(told, param="previous_response_id", code="previous_response_not_found")
    history = previous.history() if previous is not None else []
    wanted = body.input if body.input is not None else []
    names = references(wanted)
    found = _named(history, names) | shelf.find_items(names)
    stored = [*history, *(found[name] for name in names if name in found)]
    _check_size(stored, front.settings.max_body_size, "previous_response_id" if not names else "input")
    reader = Reader({name: item.read() for name, item in found.items()})
    own = reader.read(wanted)
    num_items = len(history) + len(own)
    if num_items > front.limits.messages:
        told = f"The conversation has {num_items} items: at most {front.limits.messages} are allowed."
        raise InvalidRequest(told, param="input")
    items = [*(item.read() for item in history), *own]
    more = (tool for item in items if item["type"] == "additional_tools" for tool in item["tools"])
    tools = Tools([*(body.tools or ()), *islice(more, MAX_TOOLS + 1)])
    chosen = reader.chosen | {name for name, item in found.items() if not item.is_ours}
    return Given(items, own, chosen, previous, tools, [*tools.dropped, *reader.dropped, *body.ignored])


def _named(history: Sequence[KeptItem], names: Sequence[str]) -> dict[str, KeptItem]:
    """Those of the conversation's own items that are named; here ids that the client chose are good, too."""
    wanted = set(names)
    return {item.id: item for item in history if item.id in wanted}


def _check_size(stored: Sequence[KeptItem], limit: int, param: str) -> None:
    """Raises InvalidRequest."""
    size = sum(len(item.data) for item in stored)
    if size > limit:
        told = f"The conversation has {size} bytes of stored items: at most {limit} are allowed."
        raise InvalidRequest(told, param=param, code="context_length_exceeded")


def _keeper(shelf: Shelf, given: Given) -> Keep:
    """What keeps the response to come. For a request that fits: its input becomes JSON here."""
    return partial(shelf.put, given=Kept.of(given.own, given.chosen), previous=given.previous)


async def _fit(front: Front, body: ResponsesRequest, given: Given, *, must_fit: bool = True) -> Conversation:
    """The conversation as prompt. With truncation "auto" as many of the oldest turns are left out as it takes to leave
    room for the output, or a quarter of the context if more is asked for.

    Raises InvalidRequest and InvalidParameter in chat's words."""
    room = 1
    if body.max_output_tokens is not None and body.truncation == "auto":
        room = min(body.max_output_tokens, front.info.max_model_len // 4)

    async def attempt(items: list[Item]) -> Conversation:
        chat = await asyncio.to_thread(body.to_chat, items, given.tools)
        chat.check()
        return await prepare(front, chat, least_output=room if must_fit else None)

    try:
        return await attempt(given.items)
    except InvalidRequest as error:
        starts = cuts(given.items)
        if body.truncation != "auto" or error.code != "context_length_exceeded" or not starts:
            raise
    found = await attempt(cut(given.items, starts[-1]))
    low, high = 0, len(starts) - 1  # the least cut that is known to be enough is `high`
    while low < high:
        middle = (low + high) // 2
        try:
            found = await attempt(cut(given.items, starts[middle]))
            high = middle
        except InvalidRequest as error:
            if error.code != "context_length_exceeded":
                raise
            low = middle + 1
    return found


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    if request.query_params.get("stream", "false").lower() in ("true", "1"):
        raise InvalidRequest("A stored response cannot be streamed again: ask without stream.", param="stream")
    return Response(_stored(request, response_id).body, media_type="application/json")


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response. Those that continue it keep what they need of it."""
    _stored(request, response_id)
    _shelf_of(request).delete(response_id)
    return _json({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """Only background responses could be cancelled, and there are none: whoever waits for an answer closes the
    connection."""
    _stored(request, response_id)
    raise InvalidRequest("Only background responses can be cancelled.", param="response_id")


@router.get("/v1/responses/{response_id}/input_items", openapi_extra={"parameters": PAGE_PARAMETERS})
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that the response was made from, a page at a time; the latest first unless order is "asc"."""
    return _json(_page(_stored(request, response_id).input_items(), dict(request.query_params)))


def _page(items: list[KeptItem], query: dict[str, str]) -> dict[str, Any]:
    """query: limit (1 to 100), order, after (an item's id). Raises InvalidRequest."""
    limit, order, after = query.get("limit", str(DEFAULT_PAGE)), query.get("order", "desc"), query.get("after")
    if not limit.isascii() or not limit.isdigit() or len(limit) > 3 or not 1 <= int(limit) <= MAX_PAGE:
        raise InvalidRequest(f"limit must be between 1 and {MAX_PAGE}, got {short(limit)}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"order must be asc or desc, got {short(order)}.", param="order")
    listed = items if order == "asc" else items[::-1]
    start = 0
    if after is not None:
        found = [index for index, item in enumerate(listed) if item.id == after]
        if not found:
            raise InvalidRequest(f"after names {short(after)}, which is not one of the items.", param="after")
        start = found[-1] + 1  # the last of that id: who asks for page after page comes to an end
    page = listed[start : start + int(limit)]
    return {
        "object": "list",
        "data": [orjson.Fragment(item.data) for item in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + int(limit) < len(listed),
    }


def _stored(request: Request, response_id: str) -> StoredResponse:
    """Raises ApiError 404."""
    found = _shelf_of(request).get(response_id)
    if found is None:
        raise ApiError(404, f"Response with id {short(response_id)} not found.", param="response_id", code="not_found")
    return found


def _shelf_of(request: Request) -> Shelf:
    """What the application's store, made when it is first needed, holds for the key that the request came with."""
    state = request.app.state
    store: ResponseStore | None = getattr(state, "response_store", None)
    if store is None:
        settings = state.settings
        store = state.response_store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
    return store.of(request.scope.get("state", {}).get("key_digest", ""))


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
