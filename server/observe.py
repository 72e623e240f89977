"""What one HTTP request tells the metrics, its log line, its trace and its client's account: first tokens, gaps, ends
and usage, as the assembler counts them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from engine.sampling_params import SamplingParams
from server.keys import Account
from server.metrics import Metrics
from server.tracing import Trace


class Observer:
    """One request's. arrival_s: time.monotonic of its arrival; log: facts for its log line."""

    __slots__ = (
        "_account", "_adapter", "_arrival_s", "_first_s", "_last_s", "_log", "_metrics", "_reasons", "_row_s",
        "_trace",
    )  # fmt: skip

    def __init__(
        self,
        metrics: Metrics,
        arrival_s: float,
        log: dict[str, Any],
        account: Account | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._log = log
        self._account = account
        self._trace = trace
        self._first_s: float | None = None  # the first token of any choice
        self._last_s: dict[int, float] = {}  # choice index -> its latest tokens
        self._reasons: dict[int, str] = {}  # choice index -> why it ended
        self._adapter = metrics.adapters.of("")
        self._row_s: Callable[[], float | None] = lambda: None

    @staticmethod
    def of(request: Request, metrics: Metrics) -> Observer:
        state = request.scope.get("state", {})
        arrival_s = state.get("arrival", time.monotonic())
        return Observer(metrics, arrival_s, state.get("log", {}), state.get("account"), state.get("trace"))

    def admitted(
        self,
        request: Request,
        model: str,
        params: SamplingParams,
        response_id: str,
        asked_s: float,
        *,
        adapter: str,
        row_s: Callable[[], float | None],
    ) -> None:
        """The engine has taken it, asked at `asked_s`: `ended` will follow. model: as the answer names it; adapter:
        empty where it is the model itself; row_s: tells when the first of it got a row, once that is known."""
        self._adapter = self._metrics.adapters.of(adapter)
        self._row_s = row_s
        self._adapter.admitted(self._has_row)
        if adapter:
            self._log["adapter"] = adapter
        if self._trace is not None:
            route = getattr(request.scope.get("route"), "path", "")
            self._trace.admitted(route, model, params, response_id, asked_s)

    def took(self, index: int, num_accepted: int, num_discarded: int, finish_reason: str | None) -> None:
        """One delivery to choice `index`."""
        now = time.monotonic()
        if num_accepted:
            last = self._last_s.get(index)
            if last is None:
                self._metrics.first_token(now - self._arrival_s)
                if self._first_s is None:
                    self._first_s = now
            else:
                self._metrics.inter_token(now - last, num_accepted)
            self._last_s[index] = now
        if num_discarded:
            self._metrics.discarded(num_discarded)
        if finish_reason is not None:
            self._reasons[index] = finish_reason
            self._choice_ended(finish_reason, now)

    def prompt_ended(self, lengths: Sequence[int], max_tokens: int | None) -> None:
        """A prompt has all it will get. lengths: accepted tokens of each choice; max_tokens: as asked for."""
        self._metrics.prompt_done(max(lengths), len(lengths), max_tokens)

    def ended(
        self,
        num_prompt_tokens: int,
        num_completion_tokens: int,
        num_cached_tokens: int,
        *,
        num_unfinished: int,
        failed: bool,
        scheduled_s: float | None = None,
    ) -> None:
        """The request is over. num_unfinished: choices that did not come to an end, because the request failed or
        because the client left. scheduled_s: when the first of it got a row."""
        now = time.monotonic()
        reason = "error" if failed else "abort"
        reasons = [self._reasons[index] for index in sorted(self._reasons)] + [reason] * num_unfinished
        for _ in range(num_unfinished):
            self._choice_ended(reason, now)
        self._adapter.ended(self._has_row, num_prompt_tokens, num_completion_tokens)
        self._metrics.usage(num_prompt_tokens, num_completion_tokens, num_cached_tokens)
        if self._account is not None:
            self._account.spend(num_prompt_tokens + num_completion_tokens, now)
        self._log |= {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "cached_tokens": num_cached_tokens,
            **self._times(scheduled_s),
            "finish": ",".join(sorted(set(reasons))),
        }
        if self._trace is not None:
            self._trace.generated(
                num_prompt_tokens,
                num_completion_tokens,
                num_cached_tokens,
                reasons,
                scheduled_s=scheduled_s,
                first_s=self._first_s,
                last_s=max(self._last_s.values(), default=None),
                failed=failed,
            )

    def _has_row(self) -> bool:
        return self._first_s is not None or self._row_s() is not None

    def _choice_ended(self, reason: str, now: float) -> None:
        self._metrics.request_done(reason, now - self._arrival_s)
        self._adapter.choice_ended(reason)

    def _times(self, scheduled_s: float | None) -> dict[str, float]:
        """In milliseconds, as far as it came: arrival to first row, to first token, to last token."""
        marks = {"queue_ms": scheduled_s, "prefill_ms": self._first_s, "decode_ms": None}
        if self._first_s is not None:
            marks["decode_ms"] = max(self._last_s.values())
        times, before = {}, self._arrival_s
        for name, mark in marks.items():
            if mark is None:
                break
            times[name] = round(1000 * (mark - before), 1)
            before = mark
        return times
