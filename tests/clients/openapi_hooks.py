"""What schemathesis makes of /openapi.json, led past the doors that random values do not open: the model's name, and
fields that are always refused. Loaded by `schemathesis` itself (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

import zlib
from typing import Any

import schemathesis

REFUSED = ("chat_template", "functions", "conversation", "prompt", "context_management", "moderation")
RARE = ("model", "function_call", "modalities", "previous_response_id", "structured_outputs", "response_format")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    """Of bodies that are objects: half of them are given a fair chance."""
    if not isinstance(body, dict) or zlib.crc32(repr(body).encode("utf-8", "replace")) % 2:
        return body
    path = context.operation.path if context.operation is not None else ""
    dropped = [name for name in (*REFUSED, *RARE) if not (name == "prompt" and "responses" not in path)]
    return {name: value for name, value in body.items() if name not in dropped}
