"""Metrics: names that dashboards expect, sums that add up, labels that no client can grow."""

from __future__ import annotations

import math
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import Delivery, ModelInfo, Phase
from engine.stats import CacheStats, RequestStats, StepStats
from server.histograms import Histogram
from server.metrics import Metrics
from tests.server.keys import load_keys

EXPECTED = """num_requests_running num_requests_waiting kv_cache_usage_perc num_preemptions_total prompt_tokens_total
generation_tokens_total prefix_cache_queries_total prefix_cache_hits_total request_success_total
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket request_time_per_output_token_seconds_bucket
e2e_request_latency_seconds_bucket request_queue_time_seconds_bucket request_prefill_time_seconds_bucket
request_decode_time_seconds_bucket iteration_tokens_total_bucket live_slot_utilization kv_blocks
live_slot_utilization_min copy_on_write_total block_copies_total block_evictions_total discarded_tokens_total
client_disconnects_total slow_clients_total event_loop_lag_seconds_bucket step_schedule_seconds_bucket
step_execute_seconds_bucket step_update_seconds_bucket step_seconds_bucket batch_sequences_bucket
batch_prompt_tokens_bucket request_prompt_tokens_bucket request_generation_tokens_bucket
step_forward_seconds_bucket step_sampling_seconds_bucket step_hand_over_seconds_bucket
request_inference_time_seconds_bucket request_num_preemptions_bucket request_max_num_generation_tokens_bucket
request_params_n_bucket request_params_max_tokens_bucket"""


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, *labels: str) -> float:
    return samples(metrics)["pagemill_" + name, labels]


def test_the_names_are_there_from_the_start() -> None:
    names = {name for name, _ in samples(Metrics())}
    assert {"pagemill_" + name for name in EXPECTED.split()} <= names
    assert not [name for name in names if name.endswith("_created")]


def test_gauges_follow_the_latest_step_also_one_that_computed_nothing() -> None:
    metrics = Metrics()
    cache = CacheStats(num_blocks=10, num_used_blocks=4, live_slot_steps_total=90, used_slot_steps_total=100)
    metrics.observe_delivery(Delivery(step=StepStats(1, 3, 2, 3, 40, 2, cache=cache)))
    assert value(metrics, "num_requests_running") == 3
    assert value(metrics, "num_requests_waiting") == 2
    assert value(metrics, "kv_cache_usage_perc") == 0.4
    assert value(metrics, "live_slot_utilization") == 0.9
    assert value(metrics, "kv_blocks", "free") == 6
    assert value(metrics, "iteration_tokens_total_sum") == 42
    metrics.observe_delivery(Delivery(step=StepStats(1, 0, 0, cache=CacheStats(num_blocks=10))))
    assert value(metrics, "num_requests_running") == 0
    assert value(metrics, "kv_cache_usage_perc") == 0
    assert value(metrics, "engine_steps_total") == 1, "a hand-over after an abort is no step"


def test_times_of_a_finished_sequence() -> None:
    metrics = Metrics()
    done = RequestStats("stop", 5, 0, 11, 0, arrival_s=1.0, scheduled_s=1.5, first_token_s=2.0, finished_s=4.0)
    metrics.observe_delivery(Delivery(finished=(done,)))
    assert value(metrics, "request_queue_time_seconds_sum") == 0.5
    assert value(metrics, "request_prefill_time_seconds_sum") == 0.5
    assert value(metrics, "request_decode_time_seconds_sum") == 2.0
    assert value(metrics, "request_time_per_output_token_seconds_sum") == pytest.approx(0.2)


def test_a_sequence_that_never_ran_observes_no_times() -> None:
    metrics = Metrics()
    never = RequestStats("abort", 5, 0, 0, 0, arrival_s=1.0, scheduled_s=None, first_token_s=None, finished_s=2.0)
    metrics.observe_delivery(Delivery(finished=(never,)))
    assert value(metrics, "request_queue_time_seconds_count") == 0
    assert value(metrics, "request_prefill_time_seconds_count") == 0


def test_the_http_side_counts_what_it_is_told() -> None:
    metrics = Metrics()
    metrics.usage(10, 3, 4)
    metrics.usage(1, 2, 0)
    metrics.first_token(0.2)
    metrics.inter_token(0.03, 3)
    metrics.request_done("stop", 1.5)
    metrics.request_done("anything else", 1.0)
    metrics.client_disconnected()
    metrics.slow_client()
    metrics.discarded(7)
    assert value(metrics, "prompt_tokens_total") == 11
    assert value(metrics, "generation_tokens_total") == 5
    assert value(metrics, "prompt_tokens_cached_total") == 4
    assert value(metrics, "time_to_first_token_seconds_count") == 1
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == pytest.approx(0.03)
    assert value(metrics, "request_success_total", "stop") == 1
    assert value(metrics, "request_success_total", "error") == 1
    assert value(metrics, "e2e_request_latency_seconds_count") == 2
    assert value(metrics, "client_disconnects_total") == 1
    assert value(metrics, "slow_clients_total") == 1
    metrics.connection_closed_for_room()
    assert value(metrics, "connections_closed_total") == 1
    assert value(metrics, "discarded_tokens_total") == 7


def test_labels_come_from_fixed_lists() -> None:
    metrics = Metrics()
    before = len(samples(metrics))
    for code in range(-1000, 2000):
        metrics.error(code)
        metrics.request_done(f"reason {code}", 0.1)
    grown = len(samples(metrics)) - before
    assert grown == 200 + 1, "400 to 599, and one for the rest"


def test_the_phase_and_the_model_are_shown() -> None:
    metrics = Metrics()
    metrics.watch(lambda: Phase.DRAINING, lambda: True)
    assert value(metrics, "engine_hung") == 1
    metrics.watch(lambda: Phase.STARTING, lambda: True)
    assert value(metrics, "engine_hung") == 0
    metrics.watch(lambda: Phase.DRAINING)
    metrics.model_loaded(ModelInfo("m", "s", 'odd "name"\n', 100, 50, (1,), "float32", 5, 10, 16, 8, 1))
    assert value(metrics, "engine_phase", "draining") == 1
    assert value(metrics, "engine_phase", "ready") == 0
    assert any('odd "name"\n' in labels for name, labels in samples(metrics) if name == "pagemill_model_info")


@pytest.mark.parametrize("claim", [True, False])
def test_whether_results_depend_on_the_batch(claim: bool) -> None:
    metrics = Metrics()
    metrics.model_loaded(ModelInfo("m", "s", "a", 100, 50, (1,), "float32", 5, 10, 16, 8, 1, batch_invariant=claim))
    assert value(metrics, "batch_invariant") == claim


def test_the_shape_and_the_time_of_a_step() -> None:
    metrics = Metrics()
    step = StepStats(1, 3, 0, 3, 40, 2, schedule_s=0.001, execute_s=0.02, update_s=0.002)
    metrics.observe_delivery(Delivery(step=step))
    metrics.observe_delivery(Delivery(step=StepStats(2, 3, 0, 3, 0, 3, execute_s=0.01)))
    assert value(metrics, "batch_sequences_sum") == 6
    assert value(metrics, "batch_prompt_tokens_sum") == 40
    assert value(metrics, "batch_prompt_tokens_bucket", "0.0") == 1, "one step had no prompt in it"
    assert value(metrics, "step_seconds_sum") == pytest.approx(0.033)


def test_the_parts_of_a_step_are_told_as_far_as_the_runner_tells_them() -> None:
    metrics = Metrics()
    metrics.observe_delivery(Delivery(step=StepStats(1, 3, 0, 3, 40, 2, execute_s=0.02)))
    for part in ("forward", "sampling", "hand_over"):
        assert value(metrics, f"step_{part}_seconds_count") == 0
    told = StepStats(
        2, 3, 0, 3, 0, 3, execute_s=0.02, forward_s=0.0145, sampling_s=0.0024, handed_s=time.monotonic() - 0.5
    )  # fmt: skip
    metrics.observe_delivery(Delivery(step=told))
    assert value(metrics, "step_forward_seconds_sum") == pytest.approx(0.0145)
    assert value(metrics, "step_sampling_seconds_sum") == pytest.approx(0.0024)
    assert value(metrics, "step_hand_over_seconds_sum") >= 0.5
    for bound, part in (("0.003", "sampling"), ("0.015", "forward")):
        assert value(metrics, f"step_{part}_seconds_bucket", bound) == 1
    for bound, part in (("0.002", "sampling"), ("0.01", "forward")):
        assert value(metrics, f"step_{part}_seconds_bucket", bound) == 0, "buckets tell milliseconds"


def test_what_each_key_has_used_and_nothing_of_others() -> None:
    metrics = Metrics()
    assert not [name for name, _ in samples(metrics) if "client_" in name and "disconnects" not in name]
    ring = load_keys(["a", "b"], None)
    metrics.watch_clients(lambda: ring.accounts)
    account = ring.find([b"b"])
    assert account is not None
    account.enter(0.0)
    account.spend(12, 1.0)
    assert value(metrics, "client_requests_total", "key-2") == 1
    assert value(metrics, "client_tokens_total", "key-2") == 12
    assert value(metrics, "client_in_flight", "key-2") == 1
    account.leave()
    assert value(metrics, "client_in_flight", "key-2") == 0
    assert value(metrics, "client_tokens_total", "key-1") == 0


def test_two_apps_in_one_process_do_not_share_numbers() -> None:
    one, other = Metrics(), Metrics()
    one.usage(1, 1, 0)
    assert value(other, "prompt_tokens_total") == 0


def test_histogram_counts_each_value_in_the_smallest_bucket_that_holds_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for number in (0.5, 1.0, 1.5, 2.0, 3.0):
        histogram.observe(number)
    counts = dict(histogram.cumulative())
    assert counts == {"1.0": 2, "2.0": 4, "+Inf": 5}
    assert math.isclose(histogram.sum, 8.0)
