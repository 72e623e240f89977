"""vLLM's families under its exact names, types and labels, equal to ours to the last digit."""

from __future__ import annotations

import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import Delivery
from engine.stats import CacheStats, RequestStats, StepStats
from server.adapters import LoraModule
from server.app import create_app
from server.metrics import Metrics
from server.settings import load
from tests.server.stub_engine import StubEngine

LABELS = {"model_name", "engine"}
# name -> type and labels, as vLLM makes them (v1/metrics/loggers.py)
FAMILIES: dict[str, tuple[str, set[str]]] = {
    "num_requests_running": ("gauge", LABELS),
    "num_requests_waiting": ("gauge", LABELS),
    "num_requests_waiting_by_reason": ("gauge", LABELS | {"reason"}),
    "kv_cache_usage_perc": ("gauge", LABELS),
    "prefix_cache_queries": ("counter", LABELS),
    "prefix_cache_hits": ("counter", LABELS),
    "num_preemptions": ("counter", LABELS),
    "prompt_tokens": ("counter", LABELS),
    "prompt_tokens_cached": ("counter", LABELS),
    "generation_tokens": ("counter", LABELS),
    "request_success": ("counter", LABELS | {"finished_reason"}),
    "time_to_first_token_seconds": ("histogram", LABELS),
    "inter_token_latency_seconds": ("histogram", LABELS),
    "request_time_per_output_token_seconds": ("histogram", LABELS),
    "e2e_request_latency_seconds": ("histogram", LABELS),
    "request_queue_time_seconds": ("histogram", LABELS),
    "request_inference_time_seconds": ("histogram", LABELS),
    "request_prefill_time_seconds": ("histogram", LABELS),
    "request_decode_time_seconds": ("histogram", LABELS),
    "request_prompt_tokens": ("histogram", LABELS),
    "request_generation_tokens": ("histogram", LABELS),
    "request_max_num_generation_tokens": ("histogram", LABELS),
    "request_params_n": ("histogram", LABELS),
    "request_params_max_tokens": ("histogram", LABELS),
    "request_num_preemptions": ("histogram", LABELS),
    "iteration_tokens_total": ("histogram", LABELS),
    "cache_config_info": ("gauge", {"block_size", "engine", "num_gpu_blocks"}),
}
# what the queries of vLLM's own dashboard name (examples/observability/prometheus_grafana/grafana.json); each of them
# chooses by model_name alone
DASHBOARD = {
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum", "e2e_request_latency_seconds_count",
    "prompt_tokens_total", "generation_tokens_total",
    "inter_token_latency_seconds_bucket", "inter_token_latency_seconds_sum", "inter_token_latency_seconds_count",
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "time_to_first_token_seconds_bucket", "time_to_first_token_seconds_sum", "time_to_first_token_seconds_count",
    "request_prompt_tokens_bucket", "request_generation_tokens_bucket", "request_success_total",
    "request_queue_time_seconds_sum", "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
}  # fmt: skip


async def text_of(**flags: str) -> str:
    engine = StubEngine(interval_s=0.001, ready=True)
    app = create_app(load(flags), engine)
    metrics: Metrics = app.state.metrics
    metrics.model_loaded(engine.model_info)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        for body in ({"prompt": ["a", "bcd"], "n": 2}, {"prompt": "x", "stop": "mill"}):
            assert (await client.post("/v1/completions", json={"max_tokens": 12, **body})).status_code == 200
        cache = CacheStats(num_blocks=10, num_used_blocks=4, prefix_queries_total=9, prefix_hits_total=3)
        step = StepStats(7, 2, 5, 2, 3, 2, num_preemptions_total=6, cache=cache)
        done = RequestStats("stop", 5, 0, 11, 2, arrival_s=1.0, scheduled_s=1.5, first_token_s=2.0, finished_s=4.0)
        metrics.observe_delivery(Delivery(step=step, finished=(done,)))
        return (await client.get("/metrics")).text


async def test_it_is_off_unless_asked_for() -> None:
    assert "vllm:" not in await text_of()


async def test_nothing_is_shown_before_the_model_has_a_name() -> None:
    app = create_app(load({"metrics_compat": "vllm"}), StubEngine())
    assert b"vllm:" not in app.state.metrics.render()


async def test_names_types_and_labels_are_vllms() -> None:
    text = await text_of(metrics_compat="vllm", served_model_name="tiny")
    found = {family.name: family for family in text_string_to_metric_families(text) if family.name.startswith("vllm:")}
    assert set(found) == {f"vllm:{name}" for name in FAMILIES}
    for name, (kind, labels) in FAMILIES.items():
        family = found[f"vllm:{name}"]
        assert family.type == kind, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == labels, name
            assert sample.labels["engine"] == "0"
            assert sample.labels.get("model_name", "tiny") == "tiny"
    reasons = {sample.labels["finished_reason"] for sample in found["vllm:request_success"].samples}
    assert reasons == {"stop", "length", "abort", "error"}


async def test_every_query_of_vllms_dashboard_finds_its_series() -> None:
    text = await text_of(metrics_compat="vllm", served_model_name="tiny")
    shown = {
        sample.name
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels.get("model_name") == "tiny"
    }
    assert {f"vllm:{name}" for name in DASHBOARD} <= shown


MODULES = [LoraModule(name, "/x") for name in ("sql", "chat", "old")]


def lora_info(metrics: Metrics) -> list[tuple[dict[str, str], float]]:
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    if (family := families.get("vllm:lora_requests_info")) is None:
        return []
    assert family.type == "gauge"
    return [(sample.labels, sample.value) for sample in family.samples]


def test_adapters_are_told_as_the_endpoint_picker_reads_them() -> None:
    """vLLM (v1/metrics/loggers.py): names joined by commas in labels without model_name, the Unix time as value; none
    without adapters. The picker takes the latest of several series: there must never be an older one."""
    engine = StubEngine(ready=True)
    metrics: Metrics = create_app(load({"metrics_compat": "vllm", "lora_modules": MODULES}), engine).state.metrics
    assert lora_info(metrics) == []
    metrics.model_loaded(engine.model_info)
    before = time.time()
    rows: dict[str, bool] = {}

    def told() -> tuple[str, str]:
        ((labels, value),) = lora_info(metrics)
        assert before <= value <= time.time()
        assert set(labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}
        assert labels["max_lora"] == "3"
        return labels["running_lora_adapters"], labels["waiting_lora_adapters"]

    assert told() == ("", "")
    has_row = {name: lambda name=name: rows.get(name, False) for name in ("chat", "sql", "")}
    for name, asks in has_row.items():
        metrics.adapters.of(name).admitted(asks)
    assert told() == ("", "sql,chat"), "requests without an adapter are not told"
    rows["chat"] = True
    assert told() == ("chat", "sql")
    metrics.adapters.of("chat").admitted(lambda: False)
    rows["sql"] = True
    assert told() == ("sql,chat", "chat"), "some of an adapter's requests may run while others wait"
    metrics.adapters.of("sql").ended(has_row["sql"], 1, 1)
    assert told() == ("chat", "chat")


def test_without_adapters_there_is_no_such_family() -> None:
    engine = StubEngine(ready=True)
    metrics: Metrics = create_app(load({"metrics_compat": "vllm"}), engine).state.metrics
    metrics.model_loaded(engine.model_info)
    assert lora_info(metrics) == []


async def test_the_numbers_are_ours() -> None:
    text = await text_of(metrics_compat="vllm")
    values = {
        (sample.name, sample.labels.get("le"), sample.labels.get("finished_reason")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not {"state", "code", "phase", "reason"} & set(sample.labels)
    }
    shared = 0
    for (name, bound, reason), value in values.items():
        if name.startswith("vllm:") and (key := ("pagemill_" + name[5:], bound, reason)) in values:
            assert values[key] == value, key
            shared += 1
    assert shared > 150
    assert values["vllm:kv_cache_usage_perc", None, None] == 0.4
    assert values["vllm:generation_tokens_total", None, None] == 4 * 12 + 8
    assert values["vllm:num_preemptions_total", None, None] == 6
    # two prompts of two choices each, and one that a stop string ended after 8 of its 12 tokens
    assert values["vllm:request_max_num_generation_tokens_sum", None, None] == 2 * 12 + 8
    assert values["vllm:request_params_n_count", None, None] == 3
    assert values["vllm:request_params_n_sum", None, None] == 2 + 2 + 1
    assert values["vllm:request_params_max_tokens_sum", None, None] == 5 * 12
