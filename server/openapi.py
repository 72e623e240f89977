"""/openapi.json: every route with the schema of its body, made from the models that check it.

Routes read their bodies themselves, so FastAPI cannot know them: a route says `openapi_extra=takes(Model)`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

OPENAI_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string", "examples": ["invalid_request_error", "server_error"]},
                "param": {"type": ["string", "null"], "description": "The field at fault, as a path."},
                "code": {"type": ["string", "null"], "examples": ["context_length_exceeded", "model_not_found"]},
            },
        }
    },
}
MESSAGES_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
COMPONENTS = "#/components/schemas/"
_DESCRIPTIONS = {"4XX": "The request is refused.", "5XX": "The server cannot answer."}


def answers() -> dict[str, Any]:
    """The responses of a route whose answer may be a stream of events."""
    # No type: some readers of the description hold the whole text to it, others every event as an object.
    events = {"schema": {"description": "Server-sent events, where `stream` is true."}}
    return {"200": {"content": {"application/json": {"schema": {"type": "object"}}, "text/event-stream": events}}}


def takes(model: type[BaseModel], *, streams: bool = False) -> dict[str, Any]:
    """What a route adds to its description. streams: whether the answer may be a stream of events."""
    schema = model.model_json_schema(ref_template=f"{COMPONENTS}{model.__name__}.{{model}}")
    extra: dict[str, Any] = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
    }
    if streams:
        extra["responses"] = answers()
    return extra


def document(app: FastAPI) -> dict[str, Any]:
    """The whole description, OpenAPI 3.1."""
    made = get_openapi(
        title=app.title,
        version=app.version,
        openapi_version="3.1.0",
        summary="An inference server that speaks OpenAI's API, and Anthropic's Messages API.",
        routes=app.routes,
    )
    schemas: dict[str, Any] = {"Error": OPENAI_ERROR, "MessagesError": MESSAGES_ERROR}
    for path, methods in made["paths"].items():
        for operation in methods.values():
            operation["responses"] = _responses(path, operation.get("responses", {}))
            if body := operation.get("requestBody"):
                body["content"] = {"application/json": {"schema": _hoisted(body, schemas)}}
    made.setdefault("components", {})["schemas"] = schemas
    made["components"]["securitySchemes"] = {
        "key": {"type": "http", "scheme": "bearer", "description": "Needed where the server has --api-key."}
    }
    made["security"] = [{}, {"key": []}]
    return made


def _responses(path: str, told: dict[str, Any]) -> dict[str, Any]:
    """Without FastAPI's own 422, which no route sends."""
    name = "MessagesError" if path.startswith("/v1/messages") else "Error"
    content = {"application/json": {"schema": {"$ref": COMPONENTS + name}}}
    failures = {status: {"description": text, "content": content} for status, text in _DESCRIPTIONS.items()}
    return {status: each for status, each in told.items() if status != "422"} | failures


def _hoisted(body: dict[str, Any], schemas: dict[str, Any]) -> dict[str, Any]:
    """Moves a body's schema, and those that it names, among the components; returns the reference."""
    schema: dict[str, Any] = body["content"]["application/json"]["schema"]
    owner = schema["title"]
    for name, definition in schema.pop("$defs", {}).items():
        schemas[f"{owner}.{name}"] = definition
    schemas[owner] = schema
    return {"$ref": COMPONENTS + owner}
