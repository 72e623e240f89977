"""What one HTTP request tells the metrics and its log line: first tokens, gaps, ends and usage, as the assembler
counts them."""

from __future__ import annotations

import time
from typing import Any

from server.metrics import Metrics


class Observer:
    """One request's. arrival_s: time.monotonic of its arrival; log: facts for its log line."""

    __slots__ = ("_arrival_s", "_last_s", "_log", "_metrics", "_reasons")

    def __init__(self, metrics: Metrics, arrival_s: float, log: dict[str, Any]) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._log = log
        self._last_s: dict[int, float] = {}  # choice index -> its latest tokens
        self._reasons: list[str] = []

    def took(self, index: int, num_accepted: int, num_discarded: int, finish_reason: str | None) -> None:
        """One delivery to choice `index`."""
        now = time.monotonic()
        if num_accepted:
            last = self._last_s.get(index)
            if last is None:
                self._metrics.first_token(now - self._arrival_s)
            else:
                self._metrics.inter_token(now - last, num_accepted)
            self._last_s[index] = now
        if num_discarded:
            self._metrics.discarded(num_discarded)
        if finish_reason is not None:
            self._reasons.append(finish_reason)
            self._metrics.request_done(finish_reason, now - self._arrival_s)

    def ended(
        self,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        num_cached_tokens: int,
        *,
        num_unfinished: int,
        failed: bool,
    ) -> None:
        """The request is over. num_unfinished: choices that did not come to an end, because the request failed or
        because the client left."""
        reason = "error" if failed else "abort"
        for _ in range(num_unfinished):
            self._reasons.append(reason)
            self._metrics.request_done(reason, time.monotonic() - self._arrival_s)
        self._metrics.usage(num_prompt_tokens, num_completion_tokens, num_cached_tokens)
        self._log |= {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "cached_tokens": num_cached_tokens,
            "finish": ",".join(sorted(set(self._reasons))),
        }
