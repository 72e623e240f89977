"""Every number that /metrics shows. Plain Python counters that the event loop alone touches, turned into
Prometheus families when somebody asks: an observation costs well under a microsecond.

Label values come from fixed lists, never from a client. Names are vLLM's where the thing is the same.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Literal, NamedTuple

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
from server.adapter_counts import AdapterCounts
from server.histograms import HISTOGRAMS, Histogram
from server.keys import Account

PREFIX = "pagemill_"
FINISHED_REASONS = ("stop", "length", "tool_calls", "abort", "error")
Kind = Literal["gauge", "counter"]
RECENT_ERRORS = 20


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


def usage_of(cache: CacheStats) -> float:
    return cache.num_used_blocks / cache.num_blocks if cache.num_blocks else 0.0


def _utilization(cache: CacheStats) -> float:
    return cache.live_slot_steps_total / cache.used_slot_steps_total if cache.used_slot_steps_total else 1.0


class ErrorNote(NamedTuple):
    """One error answer. time_s: Unix time; route: as it is declared, empty where none was reached."""

    time_s: float
    status: int
    route: str
    request_id: str
    let_in: bool


class Metrics(Collector):
    """The numbers of one app, in a registry of its own. All methods run on the event loop and take O(1).

    served_names: what the model answers to, where it is not its own name; adapters: names of LoRA adapters."""

    def __init__(self, served_names: Sequence[str] = (), adapters: Sequence[str] = ()) -> None:
        self._served_names = served_names
        self.adapters = AdapterCounts(adapters, lambda: self.model_name, FINISHED_REASONS)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.registry.register(self.adapters)
        ProcessCollector(registry=self.registry)
        self.step = StepStats(step_id=0, num_running=0, num_waiting=0)
        self.info: ModelInfo | None = None
        self._phase: Callable[[], Phase] = lambda: Phase.STARTING
        self._hung: Callable[[], bool] = lambda: False
        self.started_s = time.time()
        self.finished = dict.fromkeys(FINISHED_REASONS, 0)
        self._errors: dict[str, int] = {}
        self.recent_errors: deque[ErrorNote] = deque(maxlen=RECENT_ERRORS)
        self.steps = self.step_prompt_tokens = self.step_decode_tokens = 0
        self.prompt_tokens = self.generation_tokens = self.cached_tokens = 0
        self._disconnects = self._slow_clients = self._discarded = self._http_requests = 0
        self._connections_closed = self._let_in = 0
        self._loop_lag_max_s = 0.0
        self._in_flight = 0
        self._grammar_hits = self._grammar_failures = 0
        self._accounts: Callable[[], Sequence[Account]] = tuple
        self.histograms = {name: Histogram(buckets) for name, _, buckets in HISTOGRAMS}

    @property
    def model_name(self) -> str | None:
        """As answers carry it where a request names no adapter; None while only the loader knows it."""
        if self._served_names:
            return self._served_names[0]
        return self.info.name if self.info is not None else None

    # -- the engine's side --------------------------------------------------------------------------------------

    def watch(self, phase: Callable[[], Phase], hung: Callable[[], bool] = lambda: False) -> None:
        """Show the engine's phase in the `engine_phase` gauge, and in `engine_hung` whether a step does not end."""
        self._phase = phase
        self._hung = hung

    def watch_clients(self, accounts: Callable[[], Sequence[Account]]) -> None:
        """Show what each API key has used, of those that there are when somebody asks."""
        self._accounts = accounts

    def model_loaded(self, info: ModelInfo) -> None:
        self.info = info

    def observe_delivery(self, delivery: Delivery) -> None:
        """Listener of `Engine.add_listener`."""
        if (step := delivery.step) is not None:
            self.step = step
            tokens = step.num_prompt_tokens + step.num_decode_tokens
            if tokens:  # a hand-over after an abort carries gauges but is not a step
                self.steps += 1
                self.step_prompt_tokens += step.num_prompt_tokens
                self.step_decode_tokens += step.num_decode_tokens
                self._observe_step(step, tokens)
        for request in delivery.finished:
            self._observe_finished(request)

    def _observe_step(self, step: StepStats, num_tokens: int) -> None:
        shown = self.histograms
        shown["iteration_tokens_total"].observe(num_tokens)
        shown["batch_sequences"].observe(step.num_scheduled_seqs)
        shown["batch_prompt_tokens"].observe(step.num_prompt_tokens)
        shown["step_seconds"].observe(step.schedule_s + step.execute_s + step.update_s)
        shown["step_schedule_seconds"].observe(step.schedule_s)
        shown["step_execute_seconds"].observe(step.execute_s)
        shown["step_update_seconds"].observe(step.update_s)
        if step.forward_s is not None:
            shown["step_forward_seconds"].observe(step.forward_s)
        if step.sampling_s is not None:
            shown["step_sampling_seconds"].observe(step.sampling_s)
        if step.handed_s is not None:  # this listener comes after the streams
            shown["step_hand_over_seconds"].observe(time.monotonic() - step.handed_s)

    def _observe_finished(self, request: RequestStats) -> None:
        if request.scheduled_s is None:
            return
        shown = self.histograms
        shown["request_queue_time_seconds"].observe(request.scheduled_s - request.arrival_s)
        shown["request_inference_time_seconds"].observe(request.finished_s - request.scheduled_s)
        shown["request_num_preemptions"].observe(request.num_preemptions)
        if request.first_token_s is None:
            return
        decode_s = request.finished_s - request.first_token_s
        shown["request_prefill_time_seconds"].observe(request.first_token_s - request.scheduled_s)
        shown["request_decode_time_seconds"].observe(decode_s)
        if request.num_output_tokens > 1:
            shown["request_time_per_output_token_seconds"].observe(decode_s / (request.num_output_tokens - 1))

    # -- the HTTP side ------------------------------------------------------------------------------------------

    def http_started(self) -> None:
        self._http_requests += 1
        self._in_flight += 1

    def http_ended(self) -> None:
        self._in_flight -= 1

    def let_in(self) -> None:
        """A request may use the model: there are no keys, or its own is one."""
        self._let_in += 1

    def client_disconnected(self) -> None:
        """A client left before its answer was complete."""
        self._disconnects += 1

    def connection_closed_for_room(self) -> None:
        """There were as many connections as there may be: one was closed."""
        self._connections_closed += 1

    def slow_client(self) -> None:
        """A client was cut off because it did not read."""
        self._slow_clients += 1

    def error(self, code: int, route: str = "", request_id: str = "", *, let_in: bool = True) -> None:
        """An error answer, or an error event in a stream. code: HTTP status; route: as it is declared; let_in: whether
        who asked may use the model, else one note of a kind is enough."""
        label = str(code) if 400 <= code <= 599 else "other"
        self._errors[label] = self._errors.get(label, 0) + 1
        if not let_in:  # who has no key shall not push out what is of use
            for note in [n for n in self.recent_errors if not n.let_in and n.status == code]:
                self.recent_errors.remove(note)
        self.recent_errors.append(ErrorNote(time.time(), code, route, request_id, let_in))

    def usage(self, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> None:
        """What one answer's usage says: tokens that the assembler accepted."""
        self.prompt_tokens += prompt_tokens
        self.generation_tokens += completion_tokens
        self.cached_tokens += cached_tokens
        self.histograms["request_prompt_tokens"].observe(prompt_tokens)
        self.histograms["request_generation_tokens"].observe(completion_tokens)

    def prompt_done(self, longest: int, n: int, max_tokens: int | None) -> None:
        """All choices of a prompt ended, or its client left. longest: tokens of the longest of them; n: how many there
        are; max_tokens: as asked for, None: nothing was."""
        self.histograms["request_max_num_generation_tokens"].observe(longest)
        self.histograms["request_params_n"].observe(n)
        if max_tokens is not None:
            self.histograms["request_params_max_tokens"].observe(max_tokens, n)

    def first_token(self, seconds: float) -> None:
        """Arrival of the HTTP request to the first token of one choice."""
        self.histograms["time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float, count: int = 1) -> None:
        """Gap between two deliveries to one choice, the second of `count` tokens: each waited its share."""
        if count > 0:
            self.histograms["inter_token_latency_seconds"].observe(seconds / count, count)

    def request_done(self, reason: str, seconds: float) -> None:
        """One choice ended, `seconds` after the HTTP request arrived."""
        self.finished[reason if reason in self.finished else "error"] += 1
        self.histograms["e2e_request_latency_seconds"].observe(seconds)

    def discarded(self, count: int) -> None:
        """Tokens that arrived past a stop string."""
        self._discarded += count

    def grammar(self, seconds: float, *, cached: bool) -> None:
        """A request's grammar was ready after `seconds`; cached: it had been compiled before."""
        if cached:
            self._grammar_hits += 1
        else:
            self.histograms["grammar_compile_seconds"].observe(seconds)

    def grammar_failed(self) -> None:
        """A request's grammar was refused."""
        self._grammar_failures += 1

    def loop_lag(self, seconds: float) -> None:
        """How late the event loop ran a timer."""
        self.histograms["event_loop_lag_seconds"].observe(seconds)
        self._loop_lag_max_s = max(self._loop_lag_max_s, seconds)

    # -- exposition ---------------------------------------------------------------------------------------------

    def render(self) -> bytes:
        """The Prometheus text format (version 0.0.4)."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: registering must not read the numbers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        step = self.step
        cache = step.cache
        for name, kind, description, path in STEP_METRICS:
            yield _family(name, kind, description, attrgetter(path)(step))
        yield _family("kv_cache_usage_perc", "gauge", "Used blocks over all blocks, 0 to 1.", usage_of(cache))
        yield _family("live_slot_utilization", "gauge", "Live-slot ratio over all steps.", _utilization(cache))
        blocks = GaugeMetricFamily(PREFIX + "kv_blocks", "Blocks of the KV pool by state.", labels=["state"])
        blocks.add_metric(["used"], cache.num_used_blocks)
        blocks.add_metric(["free"], cache.num_blocks - cache.num_used_blocks)
        blocks.add_metric(["cached"], cache.num_cached_blocks)
        blocks.add_metric(["shared"], cache.num_shared_blocks)
        yield blocks
        yield from self._counters(step)
        for name, description, _ in HISTOGRAMS:
            histogram = self.histograms[name]
            buckets = histogram.cumulative()
            yield HistogramMetricFamily(PREFIX + name, description, buckets=buckets, sum_value=histogram.sum)
        yield from self._clients()
        yield from self._facts()

    def _counters(self, step: StepStats) -> Iterator[Metric]:
        rows: tuple[tuple[str, Kind, str, float], ...] = (
            ("prompt_tokens", "counter", "Prompt tokens of answers, as in their usage.", self.prompt_tokens),
            ("generation_tokens", "counter", "Tokens of answers, as in their usage.", self.generation_tokens),
            ("prompt_tokens_cached", "counter", "Prompt tokens that came from the prefix cache.", self.cached_tokens),
            ("engine_steps", "counter", "Steps that computed tokens.", self.steps),
            ("engine_prefill_computed", "counter", "Prompt tokens computed.", self.step_prompt_tokens),
            ("engine_decode_computed", "counter", "Decode tokens computed.", self.step_decode_tokens),
            (
                "discarded_tokens",
                "counter",
                "Tokens computed past a stop or an abort.",
                step.num_discarded_tokens_total + self._discarded,
            ),
            ("client_disconnects", "counter", "Clients that left early.", self._disconnects),
            ("slow_clients", "counter", "Clients cut off because they did not read.", self._slow_clients),
            ("connections_closed", "counter", "Connections closed for want of room.", self._connections_closed),
            ("http_requests", "counter", "HTTP requests that arrived.", self._http_requests),
            ("http_requests_let_in", "counter", "Of them, those that may use the model.", self._let_in),
            ("grammar_cache_hits", "counter", "Grammars found compiled.", self._grammar_hits),
            ("grammar_failures", "counter", "Grammars refused: wrong or too costly.", self._grammar_failures),
            ("http_in_flight", "gauge", "HTTP requests being answered.", self._in_flight),
            ("event_loop_lag_max_seconds", "gauge", "The latest the event loop was.", self._loop_lag_max_s),
            ("event_loop_tasks", "gauge", "Tasks of the event loop that are not done.", _num_tasks()),
        )
        for name, kind, description, value in rows:
            yield _family(name, kind, description, value)
        success = CounterMetricFamily(PREFIX + "request_success", "Choices ended.", labels=["finished_reason"])
        for reason, count in self.finished.items():
            success.add_metric([reason], count)
        yield success
        errors = CounterMetricFamily(PREFIX + "errors", "Error answers by HTTP status.", labels=["code"])
        for code, count in sorted(self._errors.items()):
            errors.add_metric([code], count)
        yield errors

    def _clients(self) -> Iterator[Metric]:
        """One series per client of the key file, and of --api-key: the operator's list, not the clients'."""
        accounts = self._accounts()
        if not accounts:
            return
        requests = CounterMetricFamily(PREFIX + "client_requests", "Requests let in, by API key.", labels=["client"])
        tokens = CounterMetricFamily(PREFIX + "client_tokens", "Tokens of answers, by API key.", labels=["client"])
        in_hand = GaugeMetricFamily(PREFIX + "client_in_flight", "Requests being answered.", labels=["client"])
        for account in accounts:
            label = [account.client.name]
            requests.add_metric(label, account.num_requests_total)
            tokens.add_metric(label, account.num_tokens_total)
            in_hand.add_metric(label, account.num_requests)
        yield from (requests, tokens, in_hand)

    def _facts(self) -> Iterator[Metric]:
        phase = GaugeMetricFamily(PREFIX + "engine_phase", "1 for the phase the engine is in.", labels=["phase"])
        current = self._phase()
        for value in Phase:
            phase.add_metric([value.value], float(value is current))
        yield phase
        hung = current is not Phase.STARTING and self._hung()
        yield _family("engine_hung", "gauge", "1 while a step takes longer than --step-timeout.", float(hung))
        yield _family("start_time_seconds", "gauge", "When the server started, Unix time.", self.started_s)
        if (info := self.info) is None:
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
