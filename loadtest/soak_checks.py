"""What must be true after hours of mixed traffic. Pure judgement over numbers: every function returns sentences, one
per fault, and none if all is well."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from loadtest.scrape import find
from loadtest.sweep import latency_growth as slope

Sample = Mapping[str, float]


@dataclass(slots=True)
class Tally:
    """What the client saw. completed_choices, prompt and output tokens: of requests that ended well. lost_*: at most
    so many more may have been counted for requests whose client went away."""

    completed: int = 0
    completed_choices: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    disconnected: int = 0
    lost_choices: int = 0
    lost_prompt_tokens: int = 0
    lost_output_tokens: int = 0
    statuses: Counter[int] = field(default_factory=Counter)  # of answers that were errors
    refused: int = 0  # bad requests that got the 4xx they deserve
    faults: Counter[str] = field(default_factory=Counter)
    unfinished: int = 0

    def counts(self) -> dict[str, int]:
        """The plain numbers."""
        return {each.name: value for each in fields(self) if isinstance(value := getattr(self, each.name), int)}

    def since(self, start: Mapping[str, int]) -> Tally:
        """What was counted after `counts` gave `start`; statuses and faults as they are."""
        counts = {name: value - start[name] for name, value in self.counts().items()}
        return Tally(**counts, statuses=self.statuses, faults=self.faults)


def check_answers(tally: Tally) -> list[str]:
    """Every request got a whole answer or the refusal it deserved."""
    faults = [f"{count} x {kind}" for kind, count in tally.faults.items()]
    if tally.unfinished:
        faults.append(f"{tally.unfinished} requests did not finish")
    if not tally.completed:
        faults.append("no request completed")
    return faults


def check_idle(metrics: Mapping[str, float]) -> list[str]:
    """Once the clients are gone nothing runs, waits or holds a block."""
    limits = {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0, "http_in_flight": 1}
    faults = []
    for name, limit in limits.items():  # the scrape itself is one request in flight
        value = find(metrics, name)
        if value is not None and value > limit:
            faults.append(f"{name} is {value:g} though no client is left")
    return faults


def check_sums(before: Mapping[str, float], after: Mapping[str, float], tally: Tally) -> list[str]:
    """The server's counters say what the client counted; requests cut off by us leave a margin, not a doubt."""
    faults = []
    for name, least, margin in (
        ("generation_tokens_total", tally.output_tokens, tally.lost_output_tokens),
        ("prompt_tokens_total", tally.prompt_tokens, tally.lost_prompt_tokens),
        ("time_to_first_token_seconds_count", tally.completed_choices, tally.lost_choices),
    ):
        start, end = find(before, name), find(after, name)
        if start is not None and end is not None and not least <= end - start <= least + margin:
            faults.append(f"{name} rose by {end - start:g}, the client counted {least} to {least + margin}")
    ended = sum(
        _labelled(after, before, "request_success_total", "finished_reason", reason) for reason in ("stop", "length")
    )
    if (
        find(after, "request_success_total") is not None
        and not 0 <= ended - tally.completed_choices <= tally.lost_choices
    ):
        faults.append(f"{ended:g} choices ended well for the server, {tally.completed_choices} for the client")
    if find(after, "errors_total") is not None:
        for status, count in tally.statuses.items():
            counted = _labelled(after, before, "errors_total", "code", str(status))
            if counted != count:
                faults.append(f"the server counted {counted:g} answers {status}, the client {count}")
    return faults


def check_growth(samples: Sequence[Sample], *, memory_limit_bytes: float, handle_limit: int = 8) -> list[str]:
    """Memory has a slope in the second half of the run if it leaks, and an end if it is a cache. Open files, sockets,
    threads and tasks: the first and the last sample, both of an idle server."""
    faults: list[str] = []
    half = samples[len(samples) // 2 :]
    if len(half) < 4:
        return faults
    span = half[-1]["t"] - half[0]["t"]
    rss = [(sample["t"], sample["rss_bytes"]) for sample in half if "rss_bytes" in sample]
    growth = slope(rss) * span
    if growth > memory_limit_bytes:
        faults.append(
            f"memory grew by {growth / 2**20:.1f} MiB in {span:.0f} s "
            f"({growth / span * 3600 / 2**20:.0f} MiB an hour; allowed {memory_limit_bytes / 2**20:.0f} MiB)"
        )
    for name in ("open_files", "sockets", "threads", "event_loop_tasks"):
        values = [sample[name] for sample in (samples[0], samples[-1]) if name in sample]
        if len(values) == 2 and values[1] - values[0] > handle_limit:
            faults.append(f"{name} rose from {values[0]:g} to {values[1]:g}")
    return faults


def _labelled(after: Mapping[str, float], before: Mapping[str, float], name: str, label: str, value: str) -> float:
    ending = f'{name}{{{label}="{value}"}}'
    return (find(after, ending) or 0.0) - (find(before, ending) or 0.0)
