"""What each LoRA adapter is asked for, and the model without one: the pagemill_adapter_* families of /metrics.

The labels are the operator's list of adapters and the model's first name, never anything that a client sent: a name
that is not served is refused before it is counted. Requests that run or wait are not counted as they go: who asks for
the metrics looks at those that are open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "pagemill_adapter_"

HasRow = Callable[[], bool]


class AdapterCount:
    """One adapter's, or the model's without one. All methods run on the event loop; all but `num_running` take
    O(1)."""

    __slots__ = ("_open", "finished", "generation_tokens", "prompt_tokens")

    def __init__(self, reasons: Sequence[str]) -> None:
        self.finished = dict.fromkeys(reasons, 0)
        self.prompt_tokens = self.generation_tokens = 0
        self._open: set[HasRow] = set()

    def admitted(self, has_row: HasRow) -> None:
        """A request was admitted; `ended` follows, with the same has_row: whether any of it runs, or has run."""
        self._open.add(has_row)

    def choice_ended(self, reason: str) -> None:
        self.finished[reason if reason in self.finished else "error"] += 1

    def ended(self, has_row: HasRow, num_prompt_tokens: int, num_completion_tokens: int) -> None:
        """What the answer's usage says."""
        self._open.discard(has_row)
        self.prompt_tokens += num_prompt_tokens
        self.generation_tokens += num_completion_tokens

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def num_running(self) -> int:
        """Of those that are open."""
        return sum(has_row() for has_row in self._open)


class AdapterCounts(Collector):
    """names: of the adapters; base: the label of the model itself, None while that has no name; reasons: why choices
    end."""

    def __init__(self, names: Sequence[str], base: Callable[[], str | None], reasons: Sequence[str]) -> None:
        self._base = base
        self._counts = {name: AdapterCount(reasons) for name in ("", *names)}

    def of(self, adapter: str) -> AdapterCount:
        """adapter: one of the names, or empty for none."""
        return self._counts[adapter]

    @property
    def adapters(self) -> dict[str, AdapterCount]:
        """By name, without the model itself."""
        return {name: count for name, count in self._counts.items() if name}

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: registering must not read the numbers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        base = self._base()
        if base is None:
            return
        counts = [(name or base, count) for name, count in self._counts.items()]
        requests = CounterMetricFamily(
            PREFIX + "requests", "Choices ended, by LoRA adapter.", labels=["adapter", "finished_reason"]
        )
        for label, count in counts:
            for reason, number in count.finished.items():
                requests.add_metric([label, reason], number)
        yield requests
        prompt = CounterMetricFamily(
            PREFIX + "prompt_tokens", "Prompt tokens of answers, by LoRA adapter.", labels=["adapter"]
        )
        generation = CounterMetricFamily(
            PREFIX + "generation_tokens", "Tokens of answers, by LoRA adapter.", labels=["adapter"]
        )
        running = GaugeMetricFamily(
            PREFIX + "requests_running", "Requests that have a row in the batch, by LoRA adapter.", labels=["adapter"]
        )
        waiting = GaugeMetricFamily(
            PREFIX + "requests_waiting",
            "Requests that wait for their first step, by LoRA adapter.",
            labels=["adapter"],
        )
        for label, count in counts:
            num_running = count.num_running
            prompt.add_metric([label], count.prompt_tokens)
            generation.add_metric([label], count.generation_tokens)
            running.add_metric([label], num_running)
            waiting.add_metric([label], count.num_open - num_running)
        yield from (prompt, generation, running, waiting)
