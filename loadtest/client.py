"""One request, start to end, against an OpenAI-compatible server: builds the body, sends it, names what went wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from loadtest.lengths import UsageError
from loadtest.prompts import Prompt
from loadtest.record import RequestRecord
from loadtest.transport import Transport, TransportError
from loadtest.workloads import PlannedRequest

Message = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Target:
    """How a server wants to be asked. extra: further body fields; omit: fields it does not take."""

    model: str
    endpoint: str = "completions"  # or "chat"
    stream: bool = True
    ignore_eos: bool = True
    timeout_s: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    omit: frozenset[str] = frozenset()

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"

    def body(self, request: PlannedRequest, history: tuple[Message, ...] = ()) -> bytes:
        """The request's JSON. history: earlier turns; a completion gets them as one text, blank-separated."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": self.stream,
        }
        if self.endpoint == "chat":
            body["messages"] = [*history, {"role": "user", "content": _text(request.prompt)}]
        elif history:
            body["prompt"] = " ".join([*(message["content"] for message in history), _text(request.prompt)])
        else:
            body["prompt"] = request.prompt
        if request.n > 1:
            body["n"] = request.n
        if request.temperature > 0:
            body["seed"] = request.seed
        if self.stream:
            body["stream_options"] = {"include_usage": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        body |= self.extra
        return json.dumps({key: value for key, value in body.items() if key not in self.omit}).encode()


def _text(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise UsageError("Chat and conversations need words: add --prompts text.")
    return prompt


async def send(transport: Transport, target: Target, body: bytes, record: RequestRecord) -> None:
    """Never raises for what the server does: `record.error` says it. Cancelling it disconnects."""
    try:
        async with asyncio.timeout(target.timeout_s):
            await transport.post(target.path, body, record)
    except TimeoutError:
        record.error = "timeout"
    except TransportError as error:
        record.error = str(error)
    finally:
        if record.error or not record.finished_s:
            record.finished_s = perf_counter()
