"""POST /v1/responses, and input_tokens. What became of earlier responses: `stored_responses.py`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
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
from server.protocol.responses_writer import ResponsesWriter
from server.response_runs import Run, Runs
from server.response_store import Kept, KeptItem, StoredResponse
from server.routes.stored_responses import log_stream, owner_of, runs_of
from server.terms import account_of

router = APIRouter()

JSON = "application/json"


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
    runs, owner = runs_of(request), owner_of(request)
    if body.background and runs.store.keeps_nothing:
        raise InvalidRequest(
            "This server keeps no responses, so there are none in the background.", param="background"
        )
    given = await front.in_turn(request, _gather, body, runs, owner, front)
    front.ignored.note(request, given.dropped)
    try:
        conversation = await _fit(front, request, body, given)
        front.ignored.note(request, conversation.ignored)
        return await _answer(request, front, body, given, conversation, model)
    except (ApiError, InvalidParameter) as error:
        raise in_our_words(to_api_error(error), given.tools) from None


async def _answer(
    request: Request, front: Front, body: ResponsesRequest, given: Given, conversation: Conversation, model: str
) -> Response:
    """Raises InvalidParameter, QueueFull, NotServing, ApiError."""
    params, streamed = conversation.params, body.stream is True
    said = await asyncio.to_thread(echo, body, given.tools, temperature=params.temperature, top_p=params.top_p)
    run = await _opened(request, body, given) if body.stored else None
    writer = ResponsesWriter(
        front.tokenizer,
        model=model,
        echo=said,
        tools=given.tools,
        logprobs=body.wants_logprobs,
        sealed=body.wants_sealed,
        queued=run is not None and run.is_background,
        keep=run.keep if run is not None else None,
        new_parser=conversation.new_parser,
        reasoning=params.reasoning,
    )
    try:
        answer = await front.admit(
            request, body, [conversation.prompt], params, writer.id, new_stop_gate=conversation.new_stop_gate,
            forms=conversation.forms,
        )  # fmt: skip
    except BaseException:
        if run is not None:
            run.close()
        raise
    if run is None:
        return await front.tell(answer, writer, request.receive, streamed=streamed)
    run.begin(writer, answer)
    return await _told(request, front, run, streamed=streamed)


async def _told(request: Request, front: Front, run: Run, *, streamed: bool) -> Response:
    """The answer of a response that is known while it runs."""
    if not run.is_background:
        return await run.tell(front, request.receive, streamed=streamed)
    begun = run.start(front, request.scope.get("state", {}).get("log", {}), account_of(request))
    return log_stream(front, run.log) if run.log is not None else Response(begun, media_type=JSON)


async def _opened(request: Request, body: ResponsesRequest, given: Given) -> Run:
    """For a request that fits: its input becomes JSON here. Raises ApiError 429."""
    kept = await asyncio.to_thread(_kept, given)
    return runs_of(request).open(
        owner_of(request), kept, given.previous, background=body.background is True, streamed=body.stream is True
    )


@router.post("/v1/responses/input_tokens", openapi_extra=takes(ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """{"input_tokens"} of a body as POST /v1/responses would take it, without an answer; also of one that is too
    long, unless its oldest turns would be left out."""
    front = front_of(request)
    body = await read(request, ResponsesRequest, ResponsesRequest.check)
    front.check_model(body.model)
    given = await front.in_turn(request, _gather, body, runs_of(request), owner_of(request), front)
    front.ignored.note(request, given.dropped)
    try:
        conversation = await _fit(front, request, body, given, must_fit=body.truncation == "auto")
        front.ignored.note(request, conversation.ignored)
    except (ApiError, InvalidParameter) as error:
        raise in_our_words(to_api_error(error), given.tools) from None
    return _json({"object": "response.input_tokens", "input_tokens": len(conversation.prompt)})


def _gather(body: ResponsesRequest, runs: Runs, owner: str, front: Front) -> Given:
    """What is stored counts before it is read: a small body cannot ask for more than a large one could bring.

    Raises InvalidRequest, ApiError 404."""
    shelf = runs.store.of(owner)
    previous = _previous(body.previous_response_id, runs, owner) if body.previous_response_id is not None else None
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


def _previous(id: str, runs: Runs, owner: str) -> StoredResponse:
    """Raises InvalidRequest."""
    is_running = runs.get(id, owner) is not None  # asked first: it is in the store before it runs no more
    previous = runs.store.get(id, owner)
    if previous is not None:
        return previous
    told = f"Previous response with id {short(id)} not found."
    if is_running:
        told = f"Previous response with id {short(id)} has not ended yet: wait until it has, or cancel it."
    code = "previous_response_in_progress" if is_running else "previous_response_not_found"
    raise InvalidRequest(told, param="previous_response_id", code=code)


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


def _kept(given: Given) -> Kept:
    """What the store keeps of the input."""
    return Kept.of(given.own, given.chosen)


async def _fit(
    front: Front, request: Request, body: ResponsesRequest, given: Given, *, must_fit: bool = True
) -> Conversation:  # fmt: skip
    """The conversation as prompt. With truncation "auto" as many of the oldest turns are left out as it takes to leave
    room for the output, or a quarter of the context if more is asked for.

    Raises InvalidRequest and InvalidParameter in chat's words."""
    room = 1
    if body.max_output_tokens is not None and body.truncation == "auto":
        room = min(body.max_output_tokens, front.info.max_model_len // 4)

    async def attempt(items: list[Item]) -> Conversation:
        chat = await front.in_turn(request, body.to_chat, items, given.tools)
        chat.check()
        return await prepare(front, request, chat, least_output=room if must_fit else None)

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


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type=JSON)
