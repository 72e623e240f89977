"""Trace files: requests with the times at which they really came. One JSON object a line, or CSV.

Three forms are read:
- ours: {"arrival_s": 0.4, "prompt_tokens": 161, "output_tokens": 338}, optional "n", "prefix_id", "prefix_tokens";
- the Mooncake traces': {"timestamp": ms, "input_length": ..., "output_length": ..., "hash_ids": [...]}, where each
  hash id names 512 tokens and equal ids are equal tokens;
- the Azure traces': CSV with TIMESTAMP, ContextTokens, GeneratedTokens.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from random import Random
from typing import Any

from loadtest.lengths import UsageError
from loadtest.prompts import Prompt, PromptSource
from loadtest.workloads import PlannedRequest, Session

HASH_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """pieces: (name, tokens) of shared prompt parts, in order; the rest of the prompt is the request's own."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    n: int = 1
    pieces: tuple[tuple[str, int], ...] = ()


def read_trace(path: Path) -> list[TraceRequest]:
    """In order of arrival, the first at 0. Raises UsageError with the line that cannot be read."""
    try:
        text = path.read_text()
    except OSError as error:
        raise UsageError(f"Cannot read the trace {path}: {error.strerror}.") from None
    lines = text.splitlines()
    rows: Iterable[Any] = csv.DictReader(lines) if path.suffix == ".csv" else (line for line in lines if line.strip())
    requests = []
    for number, row in enumerate(rows, start=1):
        try:
            requests.append(_azure(row) if path.suffix == ".csv" else _from_json(json.loads(row)))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"Cannot read request {number} of the trace {path}: {error!r}.") from None
    if not requests:
        raise UsageError(f"The trace {path} holds no request.")
    requests.sort(key=lambda request: request.arrival_s)
    start = requests[0].arrival_s
    return [
        TraceRequest(each.arrival_s - start, each.prompt_tokens, each.output_tokens, each.n, each.pieces)
        for each in requests
    ]


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """In our form (pieces beyond the first are not kept)."""
    with path.open("w") as file:
        for request in requests:
            row: dict[str, Any] = {
                "arrival_s": round(request.arrival_s, 6),
                "prompt_tokens": request.prompt_tokens,
                "output_tokens": request.output_tokens,
            }
            if request.n > 1:
                row["n"] = request.n
            if request.pieces:
                row["prefix_id"], row["prefix_tokens"] = request.pieces[0]
            file.write(json.dumps(row) + "\n")


def trace_sessions(
    requests: Sequence[TraceRequest], source: PromptSource, seed: int, *, time_scale: float = 1.0
) -> list[Session]:
    """One session per request, at its time divided by time_scale (2: twice as fast)."""
    return [
        Session(
            (
                PlannedRequest(
                    index, _prompt(request, source, seed, index), request.output_tokens, request.n, seed=index
                ),
            ),
            request.arrival_s / time_scale,
        )
        for index, request in enumerate(requests)
    ]


def _prompt(request: TraceRequest, source: PromptSource, seed: int, index: int) -> Prompt:
    own = request.prompt_tokens
    parts = []
    for name, tokens in request.pieces:
        if own > 0:
            parts.append(source.draw(Random(f"piece-{seed}-{name}"), min(tokens, own)))
            own -= min(tokens, own)
    if own:
        parts.append(source.draw(Random(f"own-{seed}-{index}"), own))
    prompt = parts[0]
    for part in parts[1:]:
        prompt = source.join(prompt, part)
    return prompt


def _from_json(row: Mapping[str, Any]) -> TraceRequest:
    if "input_length" in row:
        pieces = tuple((str(name), HASH_TOKENS) for name in row.get("hash_ids", ()))
        return _checked(TraceRequest(row["timestamp"] / 1000, row["input_length"], row["output_length"], 1, pieces))
    pieces = ((str(row["prefix_id"]), int(row["prefix_tokens"])),) if "prefix_id" in row else ()
    return _checked(
        TraceRequest(float(row["arrival_s"]), row["prompt_tokens"], row["output_tokens"], row.get("n", 1), pieces)
    )


def _azure(row: Mapping[str, str]) -> TraceRequest:
    arrival = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
    return _checked(TraceRequest(arrival, int(row["ContextTokens"]), int(row["GeneratedTokens"])))


def _checked(request: TraceRequest) -> TraceRequest:
    for number in (request.prompt_tokens, request.output_tokens, request.n):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{number!r} is no positive whole number")
    return request
