"""Small requests with very many items: refused at the first fault, in little time and memory.

A megabyte holds half a million items; an error object for each would take gigabytes and a minute."""

from __future__ import annotations

import tracemalloc
from typing import Any

import orjson
import pytest

from server.protocol.chat import ChatRequest
from server.protocol.completions import CompletionRequest
from server.protocol.errors import InvalidRequest
from server.protocol.parsing import Wire, parse
from server.protocol.tokenize import DetokenizeRequest

MESSAGE = {"role": "user", "content": "a"}
CASES: list[tuple[type[Any], dict[str, Any], str]] = [
    (ChatRequest, {"messages": "MANY"}, "messages"),
    (ChatRequest, {"messages": [MESSAGE], "tools": "MANY"}, "tools"),
    (ChatRequest, {"messages": [MESSAGE], "functions": "MANY"}, "functions"),
    (ChatRequest, {"messages": [MESSAGE], "modalities": "MANY"}, "modalities"),
    (ChatRequest, {"messages": [MESSAGE], "stop": "MANY"}, "stop"),
    (ChatRequest, {"messages": [MESSAGE], "stop_token_ids": "MANY"}, "stop_token_ids"),
    (ChatRequest, {"messages": [{"role": "user", "content": "MANY"}]}, "messages[0].content"),
    (ChatRequest, {"messages": [MESSAGE | {"tool_calls": "MANY"}]}, "messages[0].tool_calls"),
    (CompletionRequest, {"prompt": "MANY"}, "prompt"),
    (CompletionRequest, {"prompt": ["MANY"]}, "prompt"),
    (DetokenizeRequest, {"tokens": "MANY"}, "tokens"),
]


@pytest.mark.parametrize("item", [b"{}", b"null", b'"a"', b"1.5", b"[]", b'{"role":"user","content":"a"}'])
@pytest.mark.parametrize(("kind", "body", "param"), CASES, ids=[f"{case[0].__name__}-{case[2]}" for case in CASES])
def test_many_odd_items_cost_no_more_than_their_bytes(
    kind: type[Wire], body: dict[str, Any], param: str, item: bytes
) -> None:
    count = 20_000
    many = orjson.dumps(body).replace(b'"MANY"', b"[" + b",".join([item] * count) + b"]")
    tracemalloc.start()
    try:
        value = orjson.loads(many)
        _, parsed = tracemalloc.get_traced_memory()
        del value
        tracemalloc.reset_peak()
        with pytest.raises(InvalidRequest) as refused:
            parse(many, kind)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(refused.value.param).startswith(param)
    assert peak < parsed + count * 60  # beside the parsed JSON a copy of one list, but no error for each item


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"tool_choice": True}, "tool_choice must be a string or an object, got true."),
        ({"n": True, "temperature": True}, "n must be an integer, got true."),
        ({"messages": [MESSAGE | {"tool_calls": [0] * 40}]}, "messages[0].tool_calls[0] must be an object, got 0."),
    ],
)
def test_a_field_of_several_types_is_told_once(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse(orjson.dumps({"messages": [MESSAGE]} | fields), ChatRequest)
    assert refused.value.message == told
