"""Checks a Responses stream as its clients read it: every event is one that the SDK knows, in the documented order,
and what the events say adds up to the response that ends them.
"""

from __future__ import annotations

import json
from typing import Any, get_args

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel

EVENTS: dict[str, type[BaseModel]] = {
    get_args(kind.model_fields["type"].annotation)[0]: kind
    for kind in get_args(get_args(ResponseStreamEvent)[0])
}  # fmt: skip
LAST = ("response.completed", "response.incomplete", "response.failed")
# per item type: the event that grows it, the field of the item it grows into
GROWS = {
    "function_call": ("response.function_call_arguments", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input", "input"),
}
SPEAKS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def events_of(body: str) -> list[dict[str, Any]]:
    """The events of a stream; comments are left out."""
    blocks = [block for block in body.split("\n\n") if block and not block.startswith(":")]
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS[event["type"]].model_validate(event)
        events.append(event)
    return events


def check(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The final response of a stream that did not fail, after its events have told it."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert all(event["response"]["status"] == "in_progress" for event in events[:2])
    assert events[-1]["type"] in LAST
    assert all(event["type"] not in LAST for event in events[:-1])
    final: dict[str, Any] = events[-1]["response"]
    Response.model_validate(final)
    assert final["id"] == events[0]["response"]["id"]
    rest = events[2:-1]
    for index, item in enumerate(final["output"]):
        own = [event for event in rest if event["output_index"] == index]
        rest_of_own = rest[: len(own)]
        assert rest_of_own == own  # the items come one after the other
        rest = rest[len(own) :]
        _check_item(own, item)
    assert rest == []
    return final


def _check_item(events: list[dict[str, Any]], item: dict[str, Any]) -> None:
    added, *middle, done = events
    assert added["type"] == "response.output_item.added"
    assert added["item"]["id"] == item["id"]
    assert added["item"].get("status") == "in_progress"
    assert done["type"] == "response.output_item.done"
    assert done["item"] == item
    assert all(event["item_id"] == item["id"] for event in middle)
    if item["type"] in SPEAKS:
        kind, first, last = SPEAKS[item["type"]], middle[0], middle[-1]
        assert first["type"] == "response.content_part.added"
        assert last["type"] == "response.content_part.done"
        assert last["part"] == item["content"][0]
        middle, final = middle[1:-1], item["content"][0]["text"]
        field = "text"
    else:
        (kind, field), final = GROWS[item["type"]], item[GROWS[item["type"]][1]]
    *deltas, whole = middle
    assert all(event["type"] == f"{kind}.delta" for event in deltas)
    assert whole["type"] == f"{kind}.done"
    assert whole[field] == final == "".join(event["delta"] for event in deltas)
