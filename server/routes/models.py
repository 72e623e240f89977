"""GET /v1/models and /v1/models/{name}: what is served, its context length and its sampling defaults.

One object answers OpenAI's clients and Anthropic's: each finds its own fields.
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response

from server.front import Front, front_of

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    """The names of the one model, then its adapters."""
    front = front_of(request)
    names = [*front.model_names, *front.adapters]
    ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
    return _json({"object": "list", "data": [_model(front, name) for name in names], **ends})


@router.get("/v1/models/{name:path}")
async def get_model(request: Request, name: str) -> Response:
    """One model; names may hold slashes."""
    front = front_of(request)
    return _json(_model(front, front.check_model(name)))


def _model(front: Front, name: str) -> dict[str, Any]:
    info = front.info
    given = {key: value for key, value in asdict(info.sampling_defaults).items() if value is not None}
    adapter = front.adapters.get(name)
    lineage: dict[str, str | None] = {"root": info.name, "parent": None}
    if adapter is not None:  # its folder is nobody's business
        lineage = {"root": adapter.name, "parent": adapter.base_model_name or front.model_names[0]}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    return {
        "id": name,
        "object": "model",
        "created": front.created,
        "owned_by": "pagemill",
        **lineage,
        "max_model_len": info.max_model_len,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "num_parameters": info.num_parameters,
        "sampling_defaults": neutral | given,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(front.created, UTC).isoformat().replace("+00:00", "Z"),
        "max_input_tokens": info.max_model_len - 1,
        "max_tokens": info.max_model_len - 1,
    }


def _json(value: dict[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")
