"""--metrics-compat vllm: the numbers that vLLM has too, under its names, types and labels beside ours, so that
dashboards, the Gateway API's endpoint picker and autoscalers made for it find them.

Bucket bounds are ours: they are finer, and a dashboard's quantiles do not depend on them. What vLLM counts and we do
not (multimodal and external caches, sleep) is not made up.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.outputs import ModelInfo
from server.adapter_counts import AdapterCount
from server.metrics import Metrics, usage_of

PREFIX = "vllm:"
LABELS = ("model_name", "engine")
ENGINE = "0"  # there is one
REASONS = {"stop": ("stop", "tool_calls"), "length": ("length",), "abort": ("abort",), "error": ("error",)}
HISTOGRAMS = {
    "time_to_first_token_seconds": "Histogram of time to first token in seconds.",
    "inter_token_latency_seconds": "Histogram of inter-token latency in seconds.",
    "request_time_per_output_token_seconds": "Histogram of the mean time per output token of a request.",
    "e2e_request_latency_seconds": "Histogram of end-to-end request latency in seconds.",
    "request_queue_time_seconds": "Histogram of the time a request waits.",
    "request_inference_time_seconds": "Histogram of the time a request runs.",
    "request_prefill_time_seconds": "Histogram of the time to the first token once a request runs.",
    "request_decode_time_seconds": "Histogram of the time from the first token to the last.",
    "request_prompt_tokens": "Histogram of prompt tokens per request.",
    "request_generation_tokens": "Histogram of generated tokens per request.",
    "request_max_num_generation_tokens": "Histogram of the tokens of a request's longest choice.",
    "request_params_n": "Histogram of the parameter n.",
    "request_params_max_tokens": "Histogram of the parameter max_tokens.",
    "request_num_preemptions": "Histogram of preemptions per request.",
    "iteration_tokens_total": "Histogram of tokens per step.",
}


class VllmNames(Collector):
    """Shows nothing before the model is loaded."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: registering must not read the numbers."""
        return ()

    def collect(self) -> Iterator[Metric]:
        info, name = self._metrics.info, self._metrics.model_name
        if info is None or name is None:
            return
        labels = [name, ENGINE]
        yield from self._gauges(labels)
        yield from self._counters(labels)
        for name, description in HISTOGRAMS.items():
            histogram = self._metrics.histograms[name]
            family = HistogramMetricFamily(PREFIX + name, description, labels=LABELS)
            family.add_metric(labels, buckets=histogram.cumulative(), sum_value=histogram.sum)
            yield family
        yield _cache_config(info)
        if adapters := self._metrics.adapters.adapters:
            yield _lora_info(adapters)

    def _gauges(self, labels: list[str]) -> Iterator[Metric]:
        step = self._metrics.step
        for name, description, value in (
            ("num_requests_running", "Number of requests in the running batch.", step.num_running),
            ("num_requests_waiting", "Number of requests that wait.", step.num_waiting),
            ("kv_cache_usage_perc", "Used share of the KV cache, 1 means all of it.", usage_of(step.cache)),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, description, labels=LABELS)
            gauge.add_metric(labels, value)
            yield gauge
        name, description = "num_requests_waiting_by_reason", "Number of requests that wait, by why."
        waiting = GaugeMetricFamily(PREFIX + name, description, labels=(*LABELS, "reason"))
        waiting.add_metric([*labels, "capacity"], step.num_waiting)
        waiting.add_metric([*labels, "deferred"], 0)
        yield waiting

    def _counters(self, labels: list[str]) -> Iterator[Metric]:
        metrics, cache = self._metrics, self._metrics.step.cache
        for name, description, value in (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", cache.prefix_queries_total),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", cache.prefix_hits_total),
            ("num_preemptions", "Number of preemptions.", metrics.step.num_preemptions_total),
            ("prompt_tokens", "Number of prompt tokens.", metrics.prompt_tokens),
            ("prompt_tokens_cached", "Number of prompt tokens from the cache.", metrics.cached_tokens),
            ("generation_tokens", "Number of generated tokens.", metrics.generation_tokens),
        ):
            counter = CounterMetricFamily(PREFIX + name, description, labels=LABELS)
            counter.add_metric(labels, value)
            yield counter
        success = CounterMetricFamily(
            PREFIX + "request_success", "Number of requests that ended.", labels=(*LABELS, "finished_reason")
        )
        for reason, ours in REASONS.items():
            success.add_metric([*labels, reason], sum(metrics.finished[each] for each in ours))
        yield success


def _lora_info(adapters: Mapping[str, AdapterCount]) -> Metric:
    """Which adapters have requests that run or wait: names in labels, joined by commas, and as the value the Unix time
    at which that was so. The endpoint picker sends an adapter's requests where it runs, and others where fewer do than
    max_lora: here all of them at once. vLLM keeps every set of labels that there has been, and whoever reads them must
    find the latest; here there is one."""
    running, waiting = [], []
    for name, count in adapters.items():
        num_running = count.num_running
        if num_running:
            running.append(name)
        if count.num_open > num_running:
            waiting.append(name)
    labels = {
        "max_lora": str(len(adapters)),
        "running_lora_adapters": ",".join(running),
        "waiting_lora_adapters": ",".join(waiting),
    }
    name, description = "lora_requests_info", "Adapters with requests that run or wait."
    family = GaugeMetricFamily(PREFIX + name, description, labels=tuple(labels))
    family.add_metric(list(labels.values()), time.time())
    return family


def _cache_config(info: ModelInfo) -> Metric:
    """The endpoint picker reads the size of the cache from labels."""
    labels = {"block_size": str(info.block_size), "engine": ENGINE, "num_gpu_blocks": str(info.num_blocks)}
    family = GaugeMetricFamily(PREFIX + "cache_config_info", "The KV cache.", labels=tuple(labels))
    family.add_metric(list(labels.values()), 1)
    return family
