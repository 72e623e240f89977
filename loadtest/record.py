"""What happened to one request, as seen from outside, and what its bytes mean.

While requests run, only the time of each server-sent event and its bytes are kept; JSON is read afterwards (`decode`),
so that the client's own work does not eat the cores it measures. Times are seconds of time.perf_counter().
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

DONE = b"[DONE]"
DETAIL_CHARS = 300


class EventSplitter:
    """Bytes of a text/event-stream -> the data of each complete event; comments are dropped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = (self._rest + data).split(b"\n\n")
        payloads = []
        for event in events:
            if event.startswith(b"data:") and b"\n" not in event:  # the common case
                payloads.append(event[5:].strip())
                continue
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                payloads.append(b"\n".join(lines))
        return payloads


@dataclass(slots=True)
class RequestRecord:
    """One request. planned_tokens: max_tokens of one choice. error: its kind, "" if it succeeded."""

    index: int
    session: int = 0
    turn: int = 0
    planned_tokens: int = 0
    n: int = 1
    streamed: bool = True
    scheduled_s: float = 0.0  # open loop: when it should have been sent; closed loop: when it was
    sent_s: float = 0.0
    finished_s: float = 0.0
    status: int = 0
    error: str = ""
    detail: str = ""  # what the server said about its error
    events: list[tuple[float, bytes]] = field(default_factory=list)  # raw, until decoded
    body: bytearray = field(default_factory=bytearray)  # plain answers and error bodies
    # -- after decode
    prompt_tokens: int = 0
    output_tokens: int = 0  # over all choices, as the server's usage says; else the number of token events
    cached_tokens: int = 0
    has_usage: bool = False
    done: bool = False
    num_token_events: int = 0
    token_times: dict[int, list[float]] = field(default_factory=dict)  # choice index -> times of its token events
    texts: dict[int, str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    decoded: bool = False

    @property
    def first_token_s(self) -> float | None:
        """When the first token of any choice arrived; None for plain answers."""
        return min((times[0] for times in self.token_times.values()), default=None)

    @property
    def ttft_s(self) -> float | None:
        first = self.first_token_s
        return None if first is None else first - self.scheduled_s

    @property
    def e2e_s(self) -> float:
        return self.finished_s - self.scheduled_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (tokens - 1), of the mean choice; None with fewer than two tokens per choice."""
        per_choice = self.output_tokens / self.n
        first = self.first_token_s
        if first is None or per_choice < 2:
            return None
        last = max(times[-1] for times in self.token_times.values())
        return (last - first) / (per_choice - 1)

    @property
    def itl_s(self) -> list[float]:
        """Gaps between token events, choice by choice."""
        return [later - earlier for times in self.token_times.values() for earlier, later in pairwise(times)]


def decode(record: RequestRecord) -> None:
    """Reads what came in; sets `error` if the answer is not a whole one. Raw bytes are dropped. Idempotent."""
    if record.decoded:
        return
    record.decoded = True
    try:
        if record.status == 200 and record.streamed:
            for moment, payload in record.events:
                _event(record, moment, payload)
        elif record.status == 200:
            _plain(record, json.loads(record.body))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        record.error = record.error or f"unreadable answer: {type(error).__name__}"
    record.num_token_events = sum(map(len, record.token_times.values()))
    if not record.has_usage:
        record.output_tokens = record.num_token_events
    if not record.error:
        record.error = _fault(record)
        if record.status != 200:
            record.detail = record.body[:DETAIL_CHARS].decode(errors="replace")
    record.events.clear()
    record.body.clear()


def _fault(record: RequestRecord) -> str:
    if record.status != 200:
        return f"http {record.status}" if record.status else "no answer"
    if len(record.finish_reasons) < record.n:
        return "no finish_reason" if record.done or not record.streamed else "stream cut off"
    if "error" in record.finish_reasons.values():
        return "finish_reason error"
    return ""


def _event(record: RequestRecord, moment: float, payload: bytes) -> None:
    if payload == DONE:
        record.done = True
        return
    event = json.loads(payload)
    if "error" in event:
        record.error = record.error or "error event"
        record.detail = record.detail or str(event["error"])[:DETAIL_CHARS]
        return
    choices = event.get("choices", ())
    _usage(record, event.get("usage"), choices)
    for choice in choices:
        index = choice.get("index", 0)
        text, is_token = _piece(choice)
        if is_token:
            record.token_times.setdefault(index, []).append(moment)
            record.texts[index] = record.texts.get(index, "") + text
        if choice.get("finish_reason"):
            record.finish_reasons[index] = choice["finish_reason"]


def _piece(choice: dict[str, Any]) -> tuple[str, bool]:
    """The text of a streamed choice, and whether the event stands for tokens: not for a bare role or finish."""
    if "delta" in choice:
        delta = choice["delta"] or {}
        text = (delta.get("content") or "") + (delta.get("reasoning_content") or delta.get("reasoning") or "")
        return text, bool(text or delta.get("tool_calls"))
    text = choice.get("text") or ""
    return text, bool(text) or not choice.get("finish_reason")


def _plain(record: RequestRecord, answer: dict[str, Any]) -> None:
    _usage(record, answer.get("usage"), ())
    for choice in answer["choices"]:
        index = choice.get("index", 0)
        message = choice.get("message")
        record.texts[index] = (message.get("content") if message else choice.get("text")) or ""
        record.finish_reasons[index] = choice.get("finish_reason") or ""


def _usage(record: RequestRecord, usage: dict[str, Any] | None, choices: Sequence[dict[str, Any]]) -> None:
    """Counts of the whole answer, as OpenAI has them; or, as llama.cpp has them, of each choice in the event that ends
    it, which then are added up (they cannot exceed one choice's max_tokens, while counts of the whole soon do)."""
    if not usage:
        return
    record.has_usage = True
    record.prompt_tokens = usage.get("prompt_tokens", 0)
    tokens = usage.get("completion_tokens", 0)
    ended = [choice for choice in choices if choice.get("finish_reason")]
    if record.n > 1 and ended and tokens <= record.planned_tokens:
        record.output_tokens += tokens
    else:
        record.output_tokens = tokens
    record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
