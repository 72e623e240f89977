"""Every number that /metrics shows. Plain Python counters that the event loop alone touches, turned into
Prometheus families when somebody asks: an observation costs well under a microsecond.

Label values come from fixed lists, never from a client. Names are vLLM's where the thing is the same.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.outputs import Delivery, ModelInfo, Phase
from engine.stats import CacheStats, RequestStats, StepStats

PREFIX = "pagemill_"
FINISHED_REASONS = ("stop", "length", "tool_calls", "abort", "error")
# seconds: a streamed token of a small model takes milliseconds, a long queue minutes
SHORT_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1,
    2.5,
    10,
)
LONG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

Kind = Literal["gauge", "counter"]


class Histogram:
    """Counts per bucket; `buckets` are upper bounds, ascending."""

    __slots__ = ("buckets", "counts", "sum")

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.buckets, value)] += count
        self.sum += value * count

    def family(self, name: str, description: str) -> HistogramMetricFamily:
        total, cumulative = 0, []
        for bound, count in zip((*self.buckets, float("inf")), self.counts, strict=True):
            total += count
            cumulative.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return HistogramMetricFamily(PREFIX + name, description, buckets=cumulative, sum_value=self.sum)


# name, kind, description, where it stands in StepStats
STEP_METRICS: tuple[tuple[str, Kind, str, str], ...] = (
    ("num_requests_running", "gauge", "Sequences in the running batch.", "num_running"),
    ("num_requests_waiting", "gauge", "Sequences that wait for their first step.", "num_waiting"),
    ("num_preemptions", "counter", "Sequences put back to waiting for want of blocks.", "num_preemptions_total"),
    ("recomputed_tokens", "counter", "Tokens computed again after preemption.", "num_recomputed_tokens_total"),
    ("prefix_cache_queries", "counter", "Prompt tokens looked up in the prefix cache.", "cache.prefix_queries_total"),
    ("prefix_cache_hits", "counter", "Prompt tokens found in the prefix cache.", "cache.prefix_hits_total"),
    ("block_copies", "counter", "Blocks copied, copy-on-write and partial reuse.", "cache.block_copies_total"),
    ("copy_on_write", "counter", "Blocks copied for a writer of a shared block.", "cache.copy_on_write_total"),
    ("block_evictions", "counter", "Cached blocks given up for new content.", "cache.evictions_total"),
    ("live_slot_steps", "counter", "Sum over steps of distinct written slots.", "cache.live_slot_steps_total"),
    ("used_slot_steps", "counter", "Sum over steps of the slots of used blocks.", "cache.used_slot_steps_total"),
    ("live_slot_utilization_min", "gauge", "Smallest live-slot ratio of any step.", "cache.min_utilization"),
)


def _usage(cache: CacheStats) -> float:
    return cache.num_used_blocks / cache.num_blocks if cache.num_blocks else 0.0


def _utilization(cache: CacheStats) -> float:
    return cache.live_slot_steps_total / cache.used_slot_steps_total if cache.used_slot_steps_total else 1.0


class Metrics(Collector):
    """The numbers of one app, in a registry of its own. All methods run on the event loop and take O(1)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        self._step = StepStats(step_id=0, num_running=0, num_waiting=0)
        self._info: ModelInfo | None = None
        self._phase: Callable[[], Phase] = lambda: Phase.STARTING
        self._started_s = time.time()
        self._finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._errors: dict[str, int] = {}
        self._steps = self._step_prompt_tokens = self._step_decode_tokens = 0
        self._prompt_tokens = self._generation_tokens = self._cached_tokens = 0
        self._disconnects = self._slow_clients = self._discarded = self._http_requests = 0
        self._loop_lag_max_s = 0.0
        self._in_flight = 0
        self._grammar_hits = self._grammar_failures = 0
        self._ttft = Histogram(LONG_BUCKETS)
        self._itl = Histogram(SHORT_BUCKETS)
        self._tpot = Histogram(SHORT_BUCKETS)
        self._e2e = Histogram(LONG_BUCKETS)
        self._queue = Histogram(LONG_BUCKETS)
        self._prefill = Histogram(LONG_BUCKETS)
        self._decode = Histogram(LONG_BUCKETS)
        self._lag = Histogram(SHORT_BUCKETS)
        self._iteration_tokens = Histogram(TOKEN_BUCKETS)
        self._compile = Histogram(LONG_BUCKETS)
        self._step_parts = {part: Histogram(SHORT_BUCKETS) for part in ("schedule", "execute", "update")}

    # -- the engine's side --------------------------------------------------------------------------------------

    def watch(self, phase: Callable[[], Phase]) -> None:
        """Show the engine's phase in the `engine_phase` gauge."""
        self._phase = phase

    def model_loaded(self, info: ModelInfo) -> None:
        self._info = info

    def observe_delivery(self, delivery: Delivery) -> None:
        """Listener of `Engine.add_listener`."""
        if (step := delivery.step) is not None:
            self._step = step
            tokens = step.num_prompt_tokens + step.num_decode_tokens
            if tokens:  # a hand-over after an abort carries gauges but is not a step
                self._steps += 1
                self._step_prompt_tokens += step.num_prompt_tokens
                self._step_decode_tokens += step.num_decode_tokens
                self._iteration_tokens.observe(tokens)
                self._step_parts["schedule"].observe(step.schedule_s)
                self._step_parts["execute"].observe(step.execute_s)
                self._step_parts["update"].observe(step.update_s)
        for request in delivery.finished:
            self._observe_finished(request)

    def _observe_finished(self, request: RequestStats) -> None:
        if request.scheduled_s is None:
            return
        self._queue.observe(request.scheduled_s - request.arrival_s)
        if request.first_token_s is None:
            return
        decode_s = request.finished_s - request.first_token_s
        self._prefill.observe(request.first_token_s - request.scheduled_s)
        self._decode.observe(decode_s)
        if request.num_output_tokens > 1:
            self._tpot.observe(decode_s / (request.num_output_tokens - 1))

    # -- the HTTP side ------------------------------------------------------------------------------------------

    def http_started(self) -> None:
        self._http_requests += 1
        self._in_flight += 1

    def http_ended(self) -> None:
        self._in_flight -= 1

    def client_disconnected(self) -> None:
        """A client left before its answer was complete."""
        self._disconnects += 1

    def slow_client(self) -> None:
        """A client was cut off because it did not read."""
        self._slow_clients += 1

    def error(self, code: int) -> None:
        """An error answer, or an error event in a stream. code: HTTP status."""
        label = str(code) if 400 <= code <= 599 else "other"
        self._errors[label] = self._errors.get(label, 0) + 1

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """What one answer's usage says: tokens that the assembler accepted."""
        self._prompt_tokens += prompt_tokens
        self._generation_tokens += completion_tokens
        self._cached_tokens += cached_tokens

    def first_token(self, seconds: float) -> None:
        """Arrival of the HTTP request to the first token of one choice."""
        self._ttft.observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """Gap between two deliveries to one choice, the second of `count` tokens: each waited its share."""
        if count > 0:
            self._itl.observe(seconds / count, count)

    def request_done(self, reason: str, seconds: float) -> None:
        """One choice ended, `seconds` after the HTTP request arrived."""
        self._finished[reason if reason in self._finished else "error"] += 1
        self._e2e.observe(seconds)

    def discarded(self, count: int) -> None:
        """Tokens that arrived past a stop string."""
        self._discarded += count

    def grammar(self, seconds: float, *, cached: bool) -> None:
        """A request's grammar was ready after `seconds`; cached: it had been compiled before."""
        if cached:
            self._grammar_hits += 1
        else:
            self._compile.observe(seconds)

    def grammar_failed(self) -> None:
        """A request's grammar was refused."""
        self._grammar_failures += 1

    def loop_lag(self, seconds: float) -> None:
        """How late the event loop ran a timer."""
        self._lag.observe(seconds)
        self._loop_lag_max_s = max(self._loop_lag_max_s, seconds)

    # -- exposition ---------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """The Prometheus text format (version 0.0.4)."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: registering must not read the numbers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        step = self._step
        cache = step.cache
        for name, kind, description, path in STEP_METRICS:
            yield _family(name, kind, description, attrgetter(path)(step))
        yield _family("kv_cache_usage_perc", "gauge", "Used blocks over all blocks, 0 to 1.", _usage(cache))
        yield _family("live_slot_utilization", "gauge", "Live-slot ratio over all steps.", _utilization(cache))
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "Blocks of the KV pool by state.", labels=["state"])
        blocks.add_metric(["used"], cache.num_used_blocks)
        blocks.add_metric(["free"], cache.num_blocks - cache.num_used_blocks)
        blocks.add_metric(["cached"], cache.num_cached_blocks)
        blocks.add_metric(["shared"], cache.num_shared_blocks)
        yield blocks
        yield from self._counters(step)
        yield from self._histograms()
        yield from self._facts()

    def _counters(self, step: StepStats) -> Iterator[Metric]:
        rows: tuple[tuple[str, Kind, str, float], ...] = (
            ("prompt_tokens", "counter", "Prompt tokens of answers, as in their usage.", self._prompt_tokens),
            ("generation_tokens", "counter", "Tokens of answers, as in their usage.", self._generation_tokens),
            ("prompt_tokens_cached", "counter", "Prompt tokens that came from the prefix cache.", self._cached_tokens),
            ("engine_steps", "counter", "Steps that computed tokens.", self._steps),
            ("engine_prefill_computed", "counter", "Prompt tokens computed.", self._step_prompt_tokens),
            ("engine_decode_computed", "counter", "Decode tokens computed.", self._step_decode_tokens),
            (
                "discarded_tokens",
                "counter",
                "Tokens computed past a stop or an abort.",
                step.num_discarded_tokens_total + self._discarded,
            ),
            ("client_disconnects", "counter", "Clients that left early.", self._disconnects),
            ("slow_clients", "counter", "Clients cut off because they did not read.", self._slow_clients),
            ("http_requests", "counter", "HTTP requests that arrived.", self._http_requests),
            ("grammar_cache_hits", "counter", "Grammars found compiled.", self._grammar_hits),
            ("grammar_failures", "counter", "Grammars refused: wrong or too costly.", self._grammar_failures),
            ("http_in_flight", "gauge", "HTTP requests being answered.", self._in_flight),
            ("event_loop_lag_max_seconds", "gauge", "The latest the event loop was.", self._loop_lag_max_s),
            ("event_loop_tasks", "gauge", "Tasks of the event loop that are not done.", _num_tasks()),
        )
        for name, kind, description, value in rows:
            yield _family(name, kind, description, value)
        success = CounterMetricFamily(PREFIX + "request_success", "Choices ended.", labels=["finished_reason"])
        for reason, count in self._finished.items():
            success.add_metric([reason], count)
        yield success
        errors = CounterMetricFamily(PREFIX + "errors", "Error answers by HTTP status.", labels=["code"])
        for code, count in sorted(self._errors.items()):
            errors.add_metric([code], count)
        yield errors

    def _histograms(self) -> Iterator[Metric]:
        for name, description, histogram in (
            ("time_to_first_token_seconds", "Arrival to the first token.", self._ttft),
            ("inter_token_latency_seconds", "Gap between tokens of one choice.", self._itl),
            ("request_time_per_output_token_seconds", "Mean gap between tokens of a sequence.", self._tpot),
            ("e2e_request_latency_seconds", "Arrival to the end of a choice.", self._e2e),
            ("request_queue_time_seconds", "Arrival to the first step.", self._queue),
            ("request_prefill_time_seconds", "First step to first token.", self._prefill),
            ("request_decode_time_seconds", "First token to last.", self._decode),
            ("iteration_tokens_total", "Tokens computed per step.", self._iteration_tokens),
            ("grammar_compile_seconds", "Asking for a grammar to having it compiled.", self._compile),
            ("event_loop_lag_seconds", "How late the event loop ran a timer.", self._lag),
        ):
            yield histogram.family(name, description)
        for part, histogram in self._step_parts.items():
            yield histogram.family(f"step_{part}_seconds", f"The {part} part of a step.")

    def _facts(self) -> Iterator[Metric]:
        phase = GaugeMetricFamily(PREFIX + "engine_phase", "1 for the phase the engine is in.", labels=["phase"])
        current = self._phase()
        for value in Phase:
            phase.add_metric([value.value], float(value is current))
        yield phase
        yield _family("start_time_seconds", "gauge", "When the server started, Unix time.", self._started_s)
        if (info := self._info) is None:
            return
        yield _family(
            "batch_invariant", "gauge", "1 if results do not depend on the batch.", float(info.batch_invariant)
        )
        yield _family("max_model_len_tokens", "gauge", "Longest sequence served.", info.max_model_len)
        facts = InfoMetricFamily(PREFIX + "model", "What is served.")
        facts.add_metric(
            [],
            {
                "architecture": info.architecture,
                "dtype": info.dtype,
                "quantization": info.quantization,
                "model": info.name,
                "block_size": str(info.block_size),
                "system_fingerprint": info.system_fingerprint,
            },
        )
        yield facts


def _num_tasks() -> int:
    """0 where no event loop runs."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


def _family(name: str, kind: Kind, description: str, value: float) -> Metric:
    if kind == "counter":
        return CounterMetricFamily(PREFIX + name, description, value=value)
    return GaugeMetricFamily(PREFIX + name, description, value=value)
