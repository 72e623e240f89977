"""The runner of devices on tensors of the CPU: step by step the answers of ModelRunner, whatever is scheduled, and
copies that come as late as they may change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.device import Mark
from engine.sampling.sampler import NON_FINITE, NOT_PROCESSED
from engine.sampling_params import SamplingParams, StructuredOutput
from engine.step_buffers import Download
from tests.engine.delayed_lane import DelayedLane
from tests.engine.lockstep import Pair
from tests.engine.random_steps import BROKEN, FORMS, driver_of, pair, play
from tests.ops.device_reference import on_cpu
from tests.tiny import VOCAB_SIZE

__all__ = ["pair"]  # a fixture


@pytest.fixture(scope="module", autouse=True)
def reference_ops() -> Iterator[None]:
    with on_cpu():
        yield


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_every_step_is_that_of_the_model_runner(pair: Pair, seed: int, depth: int) -> None:
    play(pair, seed, depth=depth)


@pytest.mark.parametrize("seed", range(10, 14))
def test_late_copies_change_nothing(pair: Pair, seed: int) -> None:
    play(pair, seed, depth=2, lane=DelayedLane())


@pytest.mark.parametrize("seed", range(20, 24))
def test_recorded_steps_change_nothing(pair: Pair, seed: int) -> None:
    play(pair, seed, depth=2, lane=DelayedLane(), recorded=True)


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(min_value=1000), depth=st.sampled_from([1, 2]))
def test_with_any_seed(pair: Pair, seed: int, depth: int) -> None:
    play(pair, seed, depth=depth, lane=DelayedLane(), num_turns=12)


def test_what_is_drawn_behind_a_stop_is_discarded(pair: Pair) -> None:
    driver = driver_of(pair)
    params = SamplingParams(max_tokens=30, temperature=1.0, stop_token_ids=tuple(range(6, 160)))
    streams = [driver.add([10, 20, 30 + i], params, seed=i) for i in range(6)]
    driver.run()
    stopped = [s for s in streams if driver.texts[s, 0].finish_reason == "stop"]
    assert stopped
    assert driver.num_discarded >= len(stopped) - 1, "each was in one step more, but for the last one to end"
    for stream in stopped:
        *before, last = driver.texts[stream, 0].token_ids
        assert 6 <= last < 160
        assert not any(6 <= token_id < 160 for token_id in before)


def test_max_tokens_is_known_in_time(pair: Pair) -> None:
    driver = driver_of(pair)
    stream = driver.add([10, 20, 30], SamplingParams(max_tokens=7, ignore_eos=True))
    driver.run()
    assert len(driver.texts[stream, 0].token_ids) == 7
    assert driver.num_discarded == 0


def test_a_row_that_is_not_finite_fails_alone(pair: Pair) -> None:
    driver = driver_of(pair)
    params = SamplingParams(max_tokens=5, ignore_eos=True, logit_bias=((BROKEN, -100.0),), logprobs=2)
    bad = driver.add([10, BROKEN, 30], params)
    good = driver.add([10, 20, 30], params)
    driver.run()
    assert driver.texts[bad, 0].finish_reason == "error"
    assert driver.texts[bad, 0].outputs[-1].error == NON_FINITE
    assert driver.texts[good, 0].finish_reason == "length"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_a_grammar_that_ends_while_its_next_step_runs_ends_well(
    pair: Pair, form: StructuredOutput, caplog: pytest.LogCaptureFixture
) -> None:
    driver = driver_of(pair)
    driver.add([50, 60, 70], SamplingParams(max_tokens=40, ignore_eos=True))
    structured = SamplingParams(max_tokens=40, temperature=1.0, structured=form)
    streams = [driver.add([10 + i, 20, 30], structured, seed=i) for i in range(3)]
    driver.run()
    assert {driver.texts[stream, 0].finish_reason for stream in streams} == {"stop"}
    assert driver.num_discarded >= len(streams)
    assert not caplog.records


def test_steps_are_launched_before_the_last_one_is_read(pair: Pair) -> None:
    """Without a grammar nothing is waited for in launch, and a step is one copy there and one back."""
    waits: list[int] = []
    copies: list[str] = []

    class Counting(DelayedLane):
        def reach(self, last: Any) -> None:
            waits.append(len(launched))
            super().reach(last)

        def to_device(self, host: Tensor, out: Tensor) -> None:
            copies.append("there")
            super().to_device(host, out)

        def to_host(self, tensor: Tensor, out: Tensor) -> Mark:
            copies.append("back")
            return super().to_host(tensor, out)

    launched: list[int] = []
    driver = driver_of(pair, lane=Counting())
    device = driver.runner.device
    plain_launch = device.launch

    def launch(batch: Any) -> Any:
        handle = plain_launch(batch)
        launched.append(batch.step_id)
        return handle

    device.launch = launch  # type: ignore[method-assign]  # looks on
    driver.add([10, 20, 30], SamplingParams(max_tokens=6, ignore_eos=True, logprobs=1, presence_penalty=1.0))
    driver.run()
    assert waits == [2, 3, 4, 5, 6, 6], "one wait per step, while the next one is under way"
    assert copies == ["there", "back"] * 6


@dataclass(frozen=True)
class Tick:
    time_s: int

    def seconds_since(self, earlier: Any) -> float:
        return float(self.time_s - earlier.time_s)


def test_a_step_tells_what_the_forward_and_the_draw_took(pair: Pair) -> None:
    ticks = itertools.count()

    class Ticking(DelayedLane):
        def stamp(self) -> Tick:
            return Tick(next(ticks) ** 2)

    driver = driver_of(pair, lane=Ticking())
    device = driver.runner.device
    plain_launch = device.launch
    handles: list[Any] = []

    def launch(batch: Any) -> Any:
        handles.append(plain_launch(batch))
        return handles[-1]

    device.launch = launch  # type: ignore[method-assign]  # looks on
    driver.add([10, 20, 30], SamplingParams(max_tokens=2, ignore_eos=True))
    driver.run()
    told = [(handle.result().forward_s, handle.result().sampling_s) for handle in handles]
    assert told == [(1.0, 3.0), (7.0, 9.0)]


def test_a_step_that_cannot_be_launched_takes_nobody_else_along(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = driver_of(pair)
    survivor = driver.add([10, 20, 30], SamplingParams(max_tokens=12, ignore_eos=True, presence_penalty=1.0))
    for _ in range(3):
        driver.step()
    device = driver.runner.device
    driver.add([11, 21, 31], SamplingParams(max_tokens=12, ignore_eos=True))
    batch = driver.scheduler.schedule(100.0)
    assert batch is not None
    while driver._in_flight:
        oldest, handle = driver._in_flight.popleft()
        driver._take(driver.scheduler.update(oldest, handle.result(), 100.0))

    def broken(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device.backbone, "forward", broken)
        with pytest.raises(torch.OutOfMemoryError):
            device.launch(batch)
    driver._take(driver.scheduler.fail_step(batch, "broken", 100.0))
    assert driver.texts[survivor, 0].finish_reason == "error", "it was in the step"
    last = driver.add([12, 22, 32], SamplingParams(max_tokens=5, ignore_eos=True, repetition_penalty=1.2))
    driver.run()
    assert driver.texts[last, 0].finish_reason == "length"


def test_a_model_that_tells_no_hidden_states_refuses_what_needs_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    for parts in (pair.plain, pair.device):
        monkeypatch.setattr(parts.runner.backbone, "tells_hidden_states", False)
    driver = driver_of(pair)
    refused = [
        driver.add([10, 20, 30], SamplingParams(max_tokens=0, pooling="last")),
        driver.add([10, 20, 31], SamplingParams(max_tokens=3, prompt_logprobs=0)),
    ]
    served = driver.add([10, 20, 32], SamplingParams(max_tokens=3, ignore_eos=True))
    driver.run()
    assert all(driver.texts[stream, 0].outputs[-1].error_param for stream in refused)
    assert driver.texts[served, 0].finish_reason == "length"


def test_warm_up_leaves_no_trace(pair: Pair) -> None:
    driver = driver_of(pair)
    driver.runner.device.warm_up()
    stream = driver.add([10, 20, 30], SamplingParams(max_tokens=5, ignore_eos=True))
    driver.run()
    assert driver.texts[stream, 0].finish_reason == "length"


def test_ids_outside_the_vocabulary_are_not_applied(pair: Pair) -> None:
    driver = driver_of(pair)
    bad = driver.add([10, 20, 30], SamplingParams(max_tokens=5, logit_bias=((VOCAB_SIZE + 7, 1.0),), logprobs=1))
    good = driver.add([10, 20, 30], SamplingParams(max_tokens=5, logit_bias=((VOCAB_SIZE - 1, 1.0),), logprobs=1))
    driver.run()
    assert driver.texts[bad, 0].outputs[-1].error == NOT_PROCESSED
    assert driver.texts[good, 0].outputs[-1].error is None


def test_a_step_that_cannot_be_read_fails_once(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grammar's next step finds out in launch; what comes later is well."""
    driver = driver_of(pair)
    params = SamplingParams(max_tokens=9, structured=FORMS[1])
    driver.add([10, 20, 30], params)
    driver.step()
    [(oldest, handle)] = driver._in_flight
    batch = driver.scheduler.schedule(100.0)
    assert batch is not None

    def lost(_: Any) -> None:
        raise RuntimeError("lost on the way")

    driver.runner.plain.launch(batch)
    with monkeypatch.context() as patch:
        patch.setattr(Download, "wait", lost)
        with pytest.raises(RuntimeError, match="lost on the way"):
            driver.runner.device.launch(batch)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="lost on the way"):
            handle.device.result()
    driver._in_flight.clear()
    driver._take(driver.scheduler.fail_step(oldest, "lost", 100.0))
    driver._take(driver.scheduler.fail_step(batch, "lost", 100.0))
    later = driver.add([11, 21, 31], params)
    driver.run()
    assert driver.texts[later, 0].finish_reason in ("stop", "length")
