"""Records -> numbers. Pure arithmetic; percentiles interpolate linearly between neighbours, as numpy does by default.

Definitions. Time starts when a request should have been sent (open loop) or was (closed loop).
TTFT: to the first token of any choice. ITL: gaps between arrivals of one choice's tokens. TPOT: (last token - first)
/ (tokens - 1) per request. E2E: to the end of the answer. Rates: completed work over the time from the first
scheduled request to the last answer.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.lengths import UsageError
from loadtest.record import RequestRecord

PERCENTILES = (50, 90, 99)
SLO_KEYS = ("ttft", "tpot", "e2e", "itl")


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Of an ascending sequence that is not empty."""
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """count, mean, std (of the sample as it is), min, p50, p90, p99, max; only count 0 without values."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    result = {"count": len(ordered), "mean": mean, "std": math.sqrt(variance), "min": ordered[0]}
    result |= {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return result | {"max": ordered[-1]}


@dataclass(frozen=True, slots=True)
class Objective:
    """Service-level objective: every given limit (seconds) must hold for a request to count as good.
    itl is the mean gap of the request."""

    limits: Mapping[str, float]

    def met_by(self, record: RequestRecord) -> bool:
        gaps = record.itl_s
        measured = {
            "ttft": record.ttft_s,
            "tpot": record.tpot_s,
            "e2e": record.e2e_s,
            "itl": math.fsum(gaps) / len(gaps) if gaps else None,
        }
        return not record.error and all(
            value is None or value <= limit for key, limit in self.limits.items() for value in (measured[key],)
        )


def parse_objective(texts: Sequence[str]) -> Objective:
    """From `ttft:500`, `tpot:50`, `e2e:10000` (milliseconds). Raises UsageError."""
    limits = {}
    for text in texts:
        key, _, milliseconds = text.partition(":")
        try:
            limits[key] = float(milliseconds) / 1000
        except ValueError:
            limits[key] = 0.0
        if key not in SLO_KEYS or limits[key] <= 0:
            raise UsageError(f"An objective looks like ttft:500 (ms; {', '.join(SLO_KEYS)}), got {text!r}.")
    return Objective(limits)


def summarise(records: Sequence[RequestRecord], objective: Objective | None = None) -> dict[str, Any]:
    """Counts, rates and latencies (seconds) of decoded records."""
    good = [record for record in records if not record.error]
    start = min((record.scheduled_s for record in records), default=0.0)
    duration = max((record.finished_s for record in records), default=start) - start
    output_tokens = sum(record.output_tokens for record in good)
    prompt_tokens = sum(record.prompt_tokens for record in good)
    events = sum(record.num_token_events for record in good)
    summary: dict[str, Any] = {
        "duration_s": duration,
        "requests": {
            "total": len(records),
            "completed": len(good),
            "failed": len(records) - len(good),
            "short": sum(record.output_tokens < record.planned_tokens * record.n for record in good),
            "without_done": sum(record.streamed and not record.done for record in good),
            "without_usage": sum(not record.has_usage for record in good),
        },
        "tokens": {
            "prompt": prompt_tokens,
            "cached": sum(record.cached_tokens for record in good),
            "output": output_tokens,
            "per_event": output_tokens / events if events else None,
        },
        "rates": {
            "requests_per_s": _rate(len(good), duration),
            "output_tokens_per_s": _rate(output_tokens, duration),
            "total_tokens_per_s": _rate(output_tokens + prompt_tokens, duration),
        },
        "latency_s": {
            "ttft": distribution([value for record in good if (value := record.ttft_s) is not None]),
            "itl": distribution([gap for record in good for gap in record.itl_s]),
            "tpot": distribution([value for record in good if (value := record.tpot_s) is not None]),
            "e2e": distribution([record.e2e_s for record in good]),
            "send_lag": distribution([record.sent_s - record.scheduled_s for record in records]),
        },
        "errors": dict(Counter(record.error for record in records if record.error).most_common()),
        "error_examples": {record.error: record.detail for record in records if record.error and record.detail},
    }
    if objective is not None and objective.limits:
        met = sum(objective.met_by(record) for record in records)
        summary["goodput"] = {
            "objective_s": dict(objective.limits),
            "requests_per_s": _rate(met, duration),
            "share": met / len(records) if records else 0.0,
        }
    return summary


def _rate(amount: float, duration: float) -> float:
    return amount / duration if duration > 0 else 0.0
