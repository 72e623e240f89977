"""Histograms of /metrics: their names, bounds and counts. Plain Python; observing one costs under a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

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
# of a step, whose parts take tens of microseconds with a small model, and a second with a large one on a CPU
STEP_BUCKETS = (
    0.00005,
    0.0001,
    0.0002,
    0.0005,
    0.001,
    0.002,
    0.003,
    0.004,
    0.005,
    0.0075,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.2,
    0.5,
    1,
    2.5,
    10,
)
LONG_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
REQUEST_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


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

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, values up to it), as Prometheus wants them."""
        bounds = [*(repr(float(bound)) for bound in self.buckets), "+Inf"]
        return list(zip(bounds, map(float, accumulate(self.counts)), strict=True))


# name, description, buckets
HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "Arrival to the first token.", LONG_BUCKETS),
    ("inter_token_latency_seconds", "Gap between tokens of one choice.", SHORT_BUCKETS),
    ("request_time_per_output_token_seconds", "Mean gap between tokens of a sequence.", SHORT_BUCKETS),
    ("e2e_request_latency_seconds", "Arrival to the end of a choice.", LONG_BUCKETS),
    ("request_queue_time_seconds", "Arrival to the first step.", LONG_BUCKETS),
    ("request_inference_time_seconds", "First step to the end of a sequence.", LONG_BUCKETS),
    ("request_prefill_time_seconds", "First step to first token.", LONG_BUCKETS),
    ("request_decode_time_seconds", "First token to last.", LONG_BUCKETS),
    ("request_prompt_tokens", "Prompt tokens of an answer, as in its usage.", REQUEST_BUCKETS),
    ("request_generation_tokens", "Tokens of an answer, as in its usage.", REQUEST_BUCKETS),
    ("request_max_num_generation_tokens", "Tokens of a prompt's longest choice.", REQUEST_BUCKETS),
    ("request_params_n", "Choices made of a prompt.", (1, 2, 5, 10, 20)),
    ("request_params_max_tokens", "Most tokens that a choice may have, where the request says so.", REQUEST_BUCKETS),
    ("request_num_preemptions", "How often a sequence was put back to waiting.", (0, 1, 2, 3, 5, 10, 20)),
    ("iteration_tokens_total", "Tokens computed per step.", TOKEN_BUCKETS),
    ("batch_sequences", "Sequences in a step.", TOKEN_BUCKETS[:11]),
    ("batch_prompt_tokens", "Prompt tokens in a step.", (0, *TOKEN_BUCKETS)),
    ("step_seconds", "A step of the engine thread: schedule, execute, update.", STEP_BUCKETS),
    ("step_schedule_seconds", "Part of a step: deciding what to compute.", STEP_BUCKETS),
    ("step_execute_seconds", "Part of a step: computing it, forward and sampling included.", STEP_BUCKETS),
    ("step_forward_seconds", "Part of execute: the model.", STEP_BUCKETS),
    ("step_sampling_seconds", "Part of execute: choosing tokens.", STEP_BUCKETS),
    ("step_update_seconds", "Part of a step: taking its tokens in.", STEP_BUCKETS),
    ("step_hand_over_seconds", "After a step: until its tokens are written to their clients.", STEP_BUCKETS),
    ("grammar_compile_seconds", "Asking for a grammar to having it compiled.", LONG_BUCKETS),
    ("event_loop_lag_seconds", "How late the event loop ran a timer.", SHORT_BUCKETS),
)
