"""Bodies of /v1/responses that went wrong somewhere: refused in the API's words or answered, never a fault of ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.agent_engine import AgentEngine
from tests.server.harness import client_of, error_of
from tests.server.test_codex_session import BODY, OPENING, said
from tests.server.test_response_items import CALL, CUSTOM, CUSTOM_OUTPUT, OUTPUT, THOUGHT

WHOLE: dict[str, Any] = {
    **BODY,
    "stream": False,
    "input": [*OPENING, THOUGHT, CALL, CUSTOM, OUTPUT, CUSTOM_OUTPUT, {"type": "item_reference", "id": "msg_x"}],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}, "verbosity": "low"},
    "metadata": {"k": "v"},
    "max_output_tokens": 5,
    "top_logprobs": 1,
    "temperature": 0.5,
    "top_p": 0.9,
    "truncation": "auto",
    "previous_response_id": None,
    "stream_options": None,
    "stop": ["x"],
    "logit_bias": {"5": 1.0},
}
JUNK = st.sampled_from(
    [None, True, False, 0, -1, 1, 2**70, 0.5, "", "x", "\x00", "é😀" * 9, [], {}, [None], [[]], [{}], {"type": "x"},
     {"type": None}, {"a": {"b": [1]}}, ["x", 1], "function", "<|im_end|>"]
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a body."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*path, key)
        yield from places(item, (*path, key))


PLACES = list(places(WHOLE))


@settings(max_examples=300, deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), JUNK), min_size=1, max_size=3), gone=st.booleans())
async def test_any_body(changes: list[tuple[tuple[Any, ...], Any]], gone: bool) -> None:
    body = copy.deepcopy(WHOLE)
    del body["input"][-1]  # a reference to nothing is another test's
    for (*path, last), junk in changes:
        owner: Any = body
        try:
            for key in path:
                owner = owner[key]
            owner[last] = copy.deepcopy(junk)  # a later change may write into it
            if gone:
                del owner[last]
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change took it away
    async with client_of(AgentEngine([said(2)])) as client:
        response = await client.post("/v1/responses", json=body)
        if response.status_code != 200:
            assert response.status_code in (400, 404), response.text
            error_of(response, response.status_code)
        elif response.headers["content-type"] == "application/json":
            assert (await client.get(f"/v1/responses/{response.json()['id']}")).status_code in (200, 404)
