"""Errors on the wire: one exception, one envelope, and handlers that give every failure that shape.

Knows HTTP and OpenAI's error object; knows nothing of requests or models.

ApiError            anything a client is told, with its status
+-- InvalidRequest  400: the client must change the request
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from engine.outputs import NotServing, QueueFull, RequestAtFault, RequestFailed, RequestTimedOut
from engine.sampling_params import InvalidParameter
from server.protocol import message_errors

logger = logging.getLogger("pagemill.server")

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

RATE_LIMITED = "rate_limit_exceeded"
CLIENT_CLOSED = 499  # what proxies log for a client that went away


class ApiError(Exception):
    """What a client is told about a failure.

    status: HTTP status. message: sentences for people, without inner detail. type, param, code: OpenAI's fields;
    type None means the usual one of the status. headers: extra response headers (Retry-After).
    """

    def __init__(
        self,
        status: int,
        message: str,
        type: str | None = None,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type or _type_of(status)
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def envelope(self) -> bytes:
        """The JSON body: {"error": {"message", "type", "param", "code"}}."""
        fields = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return orjson.dumps({"error": fields})

    def response(self, scope: Scope) -> Response:
        """In the dialect of the request. scope: the request's."""
        body = self.envelope()
        if message_errors.speaks_messages(scope):
            body = message_errors.envelope(self.status, self.message, scope.get("state", {}).get("request_id"))
        return Response(body, status_code=self.status, headers=self.headers, media_type="application/json")


def _type_of(status: int) -> str:
    if status == 429:
        return RATE_LIMITED
    return INVALID_REQUEST if status < 500 else SERVER_ERROR


class InvalidRequest(ApiError):
    """400. `param` names the field at fault, as a path ("messages[1].content")."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


def missing(param: str, more: str = "") -> InvalidRequest:
    """For a field without which nothing can be done. more: another sentence."""
    return InvalidRequest(f"You must provide the parameter {param}.{more}", param, "missing_required_parameter")


def retold(error: ApiError, params: Iterable[tuple[re.Pattern[str], str]]) -> ApiError:
    """An error about a field that was translated, about the one that it came from: where `param` begins with a
    pattern, it is spelled as that says (with its groups), and so is the beginning of the message."""
    for pattern, spelled in params:
        if error.param and (match := pattern.match(error.param)):
            told, ours = error.message, match.expand(spelled)
            if told.startswith(match[0]):
                told = ours + told[match.end() :]
            param = ours + error.param[match.end() :]
            return ApiError(error.status, told, error.type, param, error.code, error.headers)
    return error


def to_api_error(error: Exception) -> ApiError:
    """The client's view of any exception a request may end in. Unknown ones become a 500 that says nothing of
    the inside."""
    match error:
        case ApiError():
            return error
        case InvalidParameter() | RequestAtFault():
            return InvalidRequest(str(error), param=error.param)
        case QueueFull():
            retry = {"Retry-After": str(error.retry_after_s)}
            return ApiError(429, str(error), code=RATE_LIMITED, headers=retry)
        case NotServing():
            return ApiError(503, str(error), code="not_serving", headers={"Retry-After": "1", "Connection": "close"})
        case RequestValidationError():
            return _from_validation(error)
        case HTTPException():
            return _from_http(error)
        case RequestTimedOut():  # trying again would take as long: OpenAI's and Anthropic's clients heed the header
            return ApiError(408, str(error), code="timeout", headers={"X-Should-Retry": "false"})
        case RequestFailed():
            return ApiError(500, "The request failed inside the engine.", code=SERVER_ERROR)
        case _:
            return ApiError(500, "The server had an error while processing the request.", code=SERVER_ERROR)


def install(app: FastAPI) -> None:
    """Gives every failure of every route, known or not, the envelope."""
    told = (ApiError, InvalidParameter, QueueFull, NotServing, RequestTimedOut, HTTPException, RequestValidationError)
    for kind in told:
        app.add_exception_handler(kind, _handle)
    app.add_exception_handler(RequestFailed, _handle_logged)
    app.add_exception_handler(ClientDisconnect, _handle_disconnect)


async def _handle(request: Request, error: Exception) -> Response:
    told = to_api_error(error)
    if told.status == 405:
        told.headers["Allow"] = ", ".join(_methods(request))
    return told.response(request.scope)


def _methods(request: Request) -> list[str]:
    """What this URL takes. The framework tells those of the first route alone, where several have one path."""
    routes: list[Route] = request.app.state.routes
    first = next(route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in routes if route.path == first.path for method in route.methods or ()})


async def _handle_logged(request: Request, error: Exception) -> Response:
    logger.error("A request failed inside the engine: %s", error)
    return to_api_error(error).response(request.scope)


async def _handle_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)  # nobody is there to read it


def _from_http(error: HTTPException) -> ApiError:
    status = error.status_code
    message = {
        404: "This URL does not exist on this server.",
        405: "This method is not allowed for this URL.",
    }.get(status)
    if message is None or error.detail != HTTPStatus(status).phrase:
        message = str(error.detail)
    codes = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
    return ApiError(status, message, code=codes.get(status), headers=error.headers)


def _from_validation(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:])
    return InvalidRequest(f"{path}: {first['msg']}", param=path or None)
