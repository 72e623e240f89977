"""What became of earlier responses, and what becomes of those that run: GET, DELETE, cancel, input_items."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.event_log import EventLog, LogStream
from server.front import Front, front_of
from server.openapi import answers
from server.protocol.errors import ApiError, InvalidRequest
from server.protocol.parsing import short
from server.response_runs import Run, Runs
from server.response_store import KeptItem, ResponseStore, StoredResponse
from server.terms import account_of

router = APIRouter()

MAX_RESPONSES = 4096  # kept; the least recently used go first
MAX_BACKGROUND = 64  # that run or wait at a time
MAX_PAGE = 100
DEFAULT_PAGE = 20
INCLUDE = {
    "name": "include[]", "in": "query", "schema": {"type": "array", "items": {"type": "string"}},
    "description": "Accepted; without effect.",
}  # fmt: skip
PAGE_PARAMETERS = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE}},
    {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
    {"name": "after", "in": "query", "schema": {"type": "string"}, "description": "An item's id."},
    INCLUDE,
]
STREAM_PARAMETERS = [
    {"name": "stream", "in": "query", "schema": {"type": "boolean", "default": False},
     "description": "The events, of a response that was created with background and stream."},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0},
     "description": "The sequence_number of the last event that is not wanted."},
    INCLUDE,
]  # fmt: skip
TRUE, FALSE = ("true", "1"), ("false", "0")


@router.get(
    "/v1/responses/{response_id}", openapi_extra={"parameters": STREAM_PARAMETERS, "responses": answers()}
)  # fmt: skip
async def get_response(request: Request, response_id: str) -> Response:
    """A response, as far as it has come; or the events of one that was streamed in the background."""
    query = request.query_params
    streamed, after = query.get("stream", "false").lower(), query.get("starting_after")
    if streamed not in (*TRUE, *FALSE):
        raise InvalidRequest(f"stream must be true or false, got {short(streamed)}.", param="stream")
    front = front_of(request)
    _note(request, front, {"stream", "starting_after"})
    found = _found(request, response_id)
    if streamed in TRUE:
        return _events(front, found, after)
    if after is not None:
        raise InvalidRequest("starting_after needs stream=true.", param="starting_after")
    body = found.body if isinstance(found, StoredResponse) else await found.body()
    return Response(body, media_type="application/json")


def _events(front: Front, found: Run | StoredResponse, after: str | None) -> Response:
    """after: the number of an event. Raises InvalidRequest."""
    log = found.log if isinstance(found, Run) else found.events
    if log is None:
        told = "Only a response that was created with background and stream can be streamed again: ask without stream."
        raise InvalidRequest(told, param="stream")
    if log.dropped:
        told = "The events of this response are no longer kept, for want of memory: ask without stream."
        raise InvalidRequest(told, param="stream")
    if after is None:
        return log_stream(front, log)
    if not after.isascii() or not after.isdigit() or len(after) > 9:
        raise InvalidRequest(f"starting_after must be a number from 0, got {short(after)}.", param="starting_after")
    offset = log.offset_behind(int(after))
    if offset is None:
        raise InvalidRequest(f"starting_after is {int(after)}: there is no such event yet.", param="starting_after")
    return log_stream(front, log, offset)


def log_stream(front: Front, log: EventLog, offset: int = 0) -> Response:
    """The events from there on, as they come."""
    return LogStream(log, offset, metrics=front.metrics, keep_alive_s=front.keep_alive_s)


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response; one that runs ends. Those that continue it keep what they need of it."""
    found = _found(request, response_id)
    if isinstance(found, Run):
        await found.forget()
    else:
        runs_of(request).store.delete(response_id, owner_of(request))
    return _json({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response that runs, in the background or not. Of a background response, and of one that was cancelled
    before, this is the answer at any time."""
    found = _found(request, response_id)
    if isinstance(found, Run):
        body = await found.cancel()
        if body is None:
            raise _not_found(response_id)
    elif found.may_cancel:
        body = found.body
    else:
        told = "This response has ended: only background responses, and those that run, can be cancelled."
        raise InvalidRequest(told, param="response_id")
    return Response(body, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items", openapi_extra={"parameters": PAGE_PARAMETERS})
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that the response was made from, a page at a time; the latest first unless order is "asc"."""
    found = _found(request, response_id)
    _note(request, front_of(request), {"limit", "order", "after"})
    return _json(_page(found.input_items(), dict(request.query_params)))


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


def _note(request: Request, front: Front, known: set[str]) -> None:
    """What nobody reads of the query. `include` would add to a response what was not asked for when it was made."""
    names = []
    for name, value in request.query_params.multi_items():
        if name in ("include", "include[]"):
            names.append(f"include.{value}")
        elif name not in known:
            names.append(name)
    front.ignored.note(request, names)


def _found(request: Request, response_id: str) -> Run | StoredResponse:
    """Raises ApiError 404."""
    runs, owner = runs_of(request), owner_of(request)
    found = runs.get(response_id, owner) or runs.store.get(response_id, owner)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id {short(response_id)} not found.", param="response_id", code="not_found")


def runs_of(request: Request) -> Runs:
    """The application's, with its store; made when they are first needed."""
    state = request.app.state
    runs: Runs | None = getattr(state, "response_runs", None)
    if runs is None:
        store = ResponseStore(MAX_RESPONSES, state.settings.max_stored_bytes)
        runs = state.response_runs = Runs(store, MAX_BACKGROUND)
    return runs


def owner_of(request: Request) -> str:
    """Whose key the request came with, by the account's id; empty where there are no keys."""
    account = account_of(request)
    return "" if account is None else account.id


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
