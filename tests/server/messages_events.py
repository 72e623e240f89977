"""A reader of the Messages API's event streams that holds them to the documented order."""

from __future__ import annotations

import json
from typing import Any

import httpx
from pydantic_core import from_json

DELTAS = {
    "text": {"text_delta": "text"},
    "thinking": {"thinking_delta": "thinking", "signature_delta": "signature"},
    "tool_use": {"input_json_delta": "input"},
}


class MessageEvents:
    """One stream: `events` as they came, without pings; `message`, put together from them as a client would."""

    def __init__(self, body: str) -> None:
        blocks = [block.split("\n") for block in body.split("\n\n") if block]
        pairs = [(b[0].removeprefix("event: "), json.loads(b[1].removeprefix("data: "))) for b in blocks]
        assert all(name == data["type"] for name, data in pairs)
        self.num_pings = sum(name == "ping" for name, _ in pairs)
        self.events: list[dict[str, Any]] = [data for name, data in pairs if name != "ping"]
        self.error = self.events[-1] if self.events[-1]["type"] == "error" else None
        self.message = self._read()

    def _read(self) -> dict[str, Any]:
        first, *rest = self.events
        assert first["type"] == "message_start"
        message: dict[str, Any] = first["message"]
        assert (message["content"], message["stop_reason"]) == ([], None)
        is_open = False
        for event in rest[:-1]:
            kind = event["type"]
            assert "stop_reason" not in message or message["stop_reason"] is None, "nothing follows message_delta"
            if kind == "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(self._begun(event["content_block"]))
                is_open = True
            elif kind == "content_block_delta":
                assert is_open
                self._more(message["content"][event["index"]], event["delta"])
            elif kind == "content_block_stop":
                assert is_open
                self._ended(message["content"][event["index"]])
                is_open = False
            else:
                assert kind == "message_delta"
                message |= event["delta"]
                message["usage"] = event["usage"]
        assert self.error is not None or (not is_open and rest[-1] == {"type": "message_stop"})
        return message

    def _begun(self, block: dict[str, Any]) -> dict[str, Any]:
        assert all(block[field] in ("", {}) for field in DELTAS[block["type"]].values())
        return {**block, "input": ""} if block["type"] == "tool_use" else dict(block)

    def _more(self, block: dict[str, Any], delta: dict[str, Any]) -> None:
        field = DELTAS[block["type"]][delta["type"]]
        block[field] += delta["partial_json" if field == "input" else field]

    def _ended(self, block: dict[str, Any]) -> None:
        if block["type"] == "tool_use":
            block["input"] = from_json(block["input"] or "{}", allow_partial=True)  # a limit may have cut it


async def stream(client: httpx.AsyncClient, body: dict[str, Any], **options: Any) -> MessageEvents:
    response = await client.post("/v1/messages", json=body | {"stream": True}, **options)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return MessageEvents(response.text)


def error_of(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """{"type", "message"} of a failure."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["message"]
    return dict(body["error"])
