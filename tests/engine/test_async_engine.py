"""AsyncEngine over the fake runner: admission, containment, drain, death; no torch model."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.async_engine import AsyncEngine
from engine.batch import ScheduledBatch
from engine.config import Adapter, EngineConfig, LoraConfig, SchedulerConfig, StartError
from engine.kv.manager import KVCacheManager
from engine.outputs import Delivery, ModelInfo, NotServing, Phase, QueueFull, RequestTimedOut, SequenceOutput
from engine.sampling_params import InvalidParameter, SamplingParams
from engine.scheduler import Scheduler
from engine.stats import Picture
from engine.terms import Terms
from tests.engine.fake_runner import FakeRunner

PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


class Runner(FakeRunner):
    """Fails or blocks when told to. late_fault: of the step's result, as a device reports what went wrong on it."""

    fault: BaseException | None = None
    late_fault: BaseException | None = None
    is_lost: BaseException | None = None  # once set, whatever is asked of the device says so
    gate: Any = None

    def launch(self, batch: ScheduledBatch) -> Any:
        if self.gate is not None:
            self.gate.wait()
        if self.is_lost is not None:
            raise self.is_lost
        if self.fault is not None:
            fault, self.fault = self.fault, None
            self.lost_a_step = True
            raise fault
        handle = super().launch(batch)
        if self.late_fault is not None:
            fault, self.late_fault = self.late_fault, None
            return SimpleNamespace(result=lambda: raise_it(fault))
        return handle


def raise_it(error: BaseException) -> Any:
    raise error


def parts(config: EngineConfig) -> Any:
    info = ModelInfo(
        name="fake",
        source="fake",
        architecture="Fake",
        max_model_len=64,
        vocab_size=1000,
        eos_token_ids=(2,),
        dtype="float32",
        num_parameters=0,
        num_blocks=16,
        block_size=16,
        kv_bytes_per_token=1,
        num_threads=1,
    )
    scheduler = Scheduler(config.scheduler, KVCacheManager(16, 16), 64)
    return SimpleNamespace(runner=Runner(16), scheduler=scheduler, info=info, tokenizer=None, grammars=None)


@pytest.fixture
async def engine() -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_seqs=4, max_waiting_requests=4, max_num_batched_tokens=64))
    engine = AsyncEngine(config, parts)
    await engine.start()
    yield engine
    await engine.stop()


def runner_of(engine: AsyncEngine) -> Runner:
    runner = engine._loop._runner
    assert isinstance(runner, Runner)
    return runner


async def read(stream: Any) -> list[SequenceOutput]:
    try:
        return [output async for outputs in stream for output in outputs]
    finally:
        stream.close()


async def settled(engine: AsyncEngine) -> None:
    """Until the engine's last delivery has been seen and nothing is admitted."""
    for _ in range(500):
        await asyncio.sleep(0.01)
        if not engine._streams and not engine._loop._scheduler.has_work:
            break
    assert (engine._admission.num_sequences, engine._admission.num_tokens) == (0, 0)
    manager = engine._loop._scheduler.manager
    assert manager.num_free_blocks == manager.allocator.num_blocks


async def test_every_token_of_every_choice_arrives(engine: AsyncEngine) -> None:
    stream = engine.generate([[5, 6], [7]], SamplingParams(max_tokens=4, n=2, ignore_eos=True))
    outputs = await read(stream)
    counts: dict[tuple[int, int], int] = {}
    for output in outputs:
        key = (output.prompt_index, output.choice_index)
        counts[key] = counts.get(key, 0) + len(output.token_ids)
    assert counts == {(p, c): 4 for p in (0, 1) for c in (0, 1)}
    assert sum(output.finish_reason == "length" for output in outputs) == 4
    await settled(engine)


@pytest.mark.parametrize(
    ("prompts", "params"),
    [
        ([], PARAMS),
        ([[]], PARAMS),
        ([[1000]], PARAMS),
        ([[-1]], PARAMS),
        ([[1.0]], PARAMS),
        ([[2**70]], PARAMS),
        ([[1] * 61], PARAMS),
        ([[1] * 64], SamplingParams(max_tokens=None)),
        ([[1]] * 9, PARAMS),
        ([[1]], SamplingParams(logit_bias=((1000, 1.0),))),
        ([[1]], SamplingParams(stop_token_ids=(1000,))),
    ],
    ids=["none", "empty", "id", "negative", "float", "huge", "long", "full", "many", "bias", "stop"],
)
async def test_what_can_never_be_served_is_refused(
    engine: AsyncEngine, prompts: list[list[int]], params: SamplingParams
) -> None:
    with pytest.raises(InvalidParameter):
        engine.generate(prompts, params)
    await settled(engine)


async def test_adapters_are_known_by_name() -> None:
    config = EngineConfig(lora=LoraConfig((Adapter("a", "x"), Adapter("b", "y"))))
    engine = AsyncEngine(config, parts)
    await engine.start()
    batches: list[ScheduledBatch] = []
    runner, launch = runner_of(engine), runner_of(engine).launch
    runner.launch = lambda batch: [batches.append(batch), launch(batch)][1]  # type: ignore[method-assign]  # looks on
    for name in ("b", "", "a"):
        await read(engine.generate([[5, 6]], SamplingParams(max_tokens=1), adapter=name))
    assert [new.adapter for batch in batches for new in batch.new_rows] == [2, 0, 1]
    for name in ("c", "x", "A"):
        with pytest.raises(InvalidParameter):
            engine.generate([[5, 6]], PARAMS, adapter=name)
    await settled(engine)
    await engine.stop()


async def test_absent_max_tokens_means_what_remains(engine: AsyncEngine) -> None:
    outputs = await read(engine.generate([[5] * 60], SamplingParams(max_tokens=None, ignore_eos=True)))
    assert sum(len(output.token_ids) for output in outputs) == 4


async def test_a_full_queue_refuses_and_recovers(engine: AsyncEngine) -> None:
    streams = [engine.generate([[i + 3]], PARAMS) for i in range(8)]
    with pytest.raises(QueueFull):
        engine.generate([[1]], PARAMS)
    for stream in streams:
        assert (await read(stream))[-1].finish_reason == "length"
    await settled(engine)
    assert (await read(engine.generate([[1]], PARAMS)))[-1].finish_reason == "length"


async def test_a_step_that_fails_ends_its_requests_and_no_others(engine: AsyncEngine) -> None:
    runner_of(engine).fault = RuntimeError("a kernel failed")
    outputs = await read(engine.generate([[5]], PARAMS))
    assert outputs[-1].finish_reason == "error"
    assert "kernel" not in (outputs[-1].error or ""), "inner detail stays inside"
    assert engine.phase is Phase.READY
    assert (await read(engine.generate([[5]], PARAMS)))[-1].finish_reason == "length"
    await settled(engine)


async def test_a_closed_stream_frees_its_blocks(engine: AsyncEngine) -> None:
    deliveries: list[Delivery] = []
    engine.add_listener(deliveries.append)
    stream = engine.generate([[5]], SamplingParams(max_tokens=60, ignore_eos=True))
    await anext(stream)
    stream.close()
    await settled(engine)
    last = deliveries[-1].step
    assert last is not None
    assert (last.num_running, last.num_waiting, last.cache.num_used_blocks) == (0, 0, 0)


async def test_steps_that_the_event_loop_was_late_for_leave_as_one(engine: AsyncEngine) -> None:
    steps = threading.Semaphore(3)
    runner_of(engine).gate = SimpleNamespace(wait=steps.acquire)
    stream = engine.generate([[5]], SamplingParams(max_tokens=6, n=2, ignore_eos=True))
    taken: list[list[int]] = []
    deliveries: list[Delivery] = []
    engine.add_listener(deliveries.append)
    stream.pass_to(lambda outputs: taken.append([len(o.token_ids) for o in outputs]) or True)
    reading = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    while runner_of(engine).num_computed_tokens < 5 or len(engine._outbox) < 3:
        time.sleep(0.001)  # noqa: ASYNC251  # nobody else may run
    await asyncio.sleep(0.05)
    assert taken == [[3, 3]]
    steps.release(10)
    assert sum(len(output.token_ids) for output in await reading) + sum(map(sum, taken)) == 12
    assert len({d.step.step_id for d in deliveries if d.step is not None}) >= 6
    await settled(engine)


async def test_draining_refuses_new_work_and_ends_what_takes_too_long(engine: AsyncEngine) -> None:

    runner_of(engine).gate = gate = threading.Event()
    stream = engine.generate([[5]], PARAMS)
    reading = asyncio.create_task(read(stream))
    await engine.drain(0.05)
    with pytest.raises(NotServing):
        engine.generate([[5]], PARAMS)
    gate.set()
    assert (await reading)[-1].finish_reason == "error"


async def test_death_reaches_every_reader(engine: AsyncEngine) -> None:
    runner_of(engine).fault = SystemExit("not an Exception: no containment")
    outputs = await read(engine.generate([[5]], PARAMS))
    await engine.wait_dead()
    assert engine.phase is Phase.DEAD
    assert outputs[-1].finish_reason == "error"
    with pytest.raises(NotServing):
        engine.generate([[5]], PARAMS)


@pytest.fixture(params=[1, 2], ids=["one in flight", "two in flight"])
async def deep(request: pytest.FixtureRequest) -> AsyncIterator[AsyncEngine]:
    config = EngineConfig(
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, pipeline_depth=request.param)
    )
    engine = AsyncEngine(config, parts)
    await engine.start()
    yield engine
    await engine.stop()


LOST = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("place", ["fault", "late_fault"])
async def test_a_lost_device_ends_the_engine_and_every_request(deep: AsyncEngine, place: str) -> None:
    runner = runner_of(deep)
    steps, begun = threading.Semaphore(4), list[bool]()
    runner.gate = SimpleNamespace(wait=lambda: begun.append(steps.acquire()))
    streams = [deep.generate([[5 + i]], SamplingParams(max_tokens=40, ignore_eos=True)) for i in range(3)]
    readers = [asyncio.create_task(read(stream)) for stream in streams]
    while len(begun) < 4:  # noqa: ASYNC110  # a thread sets no asyncio.Event
        await asyncio.sleep(0.001)
    setattr(runner, place, LOST)
    steps.release(100)
    await asyncio.wait_for(deep.wait_dead(), 30)
    assert deep.phase is Phase.DEAD
    for reader in readers:
        last = (await reader)[-1]
        assert last.finish_reason == "error"
        assert last.error == "The engine died while computing this request."
    with pytest.raises(NotServing):
        deep.generate([[5]], PARAMS)
    assert deep._loop._runner is runner, "what lies on a lost device is not freed"


async def test_a_device_that_is_lost_behind_a_step_is_found_by_the_next_call(deep: AsyncEngine) -> None:
    runner = runner_of(deep)
    runner.is_lost = RuntimeError("pagemill.linear: launch: CUDA error 700")
    assert (await read(deep.generate([[5]], PARAMS)))[-1].finish_reason == "error"
    await asyncio.wait_for(deep.wait_dead(), 30)


@pytest.mark.parametrize("place", ["fault", "late_fault"])
async def test_a_step_without_memory_ends_its_requests_and_no_others(
    deep: AsyncEngine, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    monkeypatch.setattr("engine.loop.give_back_memory", lambda: given_back.append(1))
    setattr(runner_of(deep), place, FULL)
    outputs = await read(deep.generate([[5]], PARAMS))
    assert outputs[-1].finish_reason == "error"
    assert outputs[-1].error == "The engine ran out of memory while computing this request."
    assert deep.phase is Phase.READY
    assert (await read(deep.generate([[5]], PARAMS)))[-1].finish_reason == "length"
    assert given_back == [1]
    await settled(deep)


async def test_a_step_that_hangs_is_noticed() -> None:

    engine = AsyncEngine(EngineConfig(step_timeout_s=0.01), parts)
    await engine.start()
    runner_of(engine).gate = gate = threading.Event()
    stream = engine.generate([[5]], PARAMS)
    await asyncio.sleep(0.1)
    assert engine.hung
    gate.set()
    await read(stream)
    assert not engine.hung
    await engine.stop()


async def test_the_pool_is_known_before_the_first_step() -> None:
    engine = AsyncEngine(EngineConfig(), parts)
    told: list[Delivery] = []
    engine.add_listener(told.append)
    await engine.start()
    await asyncio.sleep(0)
    await engine.stop()
    assert told[0].step is not None
    assert told[0].step.cache.num_blocks > 0
    assert told[0].step.num_scheduled_seqs == 0


class Device(Runner):
    """Runs on after `launch`, and tells at the end how long it took."""

    def launch(self, batch: ScheduledBatch) -> Any:
        output = super().launch(batch).result()
        return SimpleNamespace(result=lambda: output._replace(forward_s=0.25, sampling_s=0.125))


async def test_the_parts_of_a_step_come_with_its_delivery() -> None:
    def load(config: EngineConfig) -> Any:
        loaded = parts(config)
        loaded.runner = Device(16)
        return loaded

    engine = AsyncEngine(EngineConfig(), load)
    told: list[Delivery] = []
    engine.add_listener(told.append)
    await engine.start()
    await read(engine.generate([[5]], PARAMS))
    await settled(engine)
    await engine.stop()
    steps = [delivery.step for delivery in told if delivery.step is not None and delivery.step.num_scheduled_seqs]
    assert len(steps) == 4
    for step in steps:
        assert (step.forward_s, step.sampling_s) == (0.25, 0.125)
        assert min(step.schedule_s, step.execute_s, step.update_s) > 0
        assert step.handed_s is not None
        assert step.handed_s <= time.monotonic()
    assert told[0].step is not None
    assert told[0].step.handed_s is None, "gauges alone are no step"


async def test_a_load_that_fails_says_why() -> None:
    def load(config: EngineConfig) -> Any:
        raise StartError("There is no model.")

    engine = AsyncEngine(EngineConfig(), load)
    with pytest.raises(StartError, match="There is no model"):
        await engine.start()
    assert engine.phase is Phase.DEAD
    await engine.stop()


# -- terms


async def test_a_request_whose_time_is_over_ends_with_that_and_gives_its_blocks_back(engine: AsyncEngine) -> None:
    """Also while a step hangs: the answer does not wait for it."""
    runner = runner_of(engine)
    runner.gate = threading.Event()
    terms = Terms(deadline_s=time.monotonic() + 0.05)
    stream = engine.generate([[5, 6], [7]], SamplingParams(max_tokens=50, n=2, ignore_eos=True), terms=terms)
    outputs = await asyncio.wait_for(read(stream), 5)
    assert {(o.prompt_index, o.choice_index) for o in outputs if o.finish_reason == "timeout"} == {
        (p, c) for p in (0, 1) for c in (0, 1)
    }
    runner.gate.set()
    await settled(engine)


async def test_a_request_that_ends_in_time_is_left_alone(engine: AsyncEngine) -> None:
    outputs = await read(engine.generate([[5]], PARAMS, terms=Terms(deadline_s=time.monotonic() + 60)))
    assert outputs[-1].finish_reason == "length"
    assert not engine._deadlines
    await settled(engine)


async def test_a_request_that_comes_too_late_is_not_begun(engine: AsyncEngine) -> None:
    with pytest.raises(RequestTimedOut):
        engine.generate([[5]], PARAMS, terms=Terms(deadline_s=time.monotonic() - 0.001))
    await settled(engine)


async def test_a_stream_knows_when_it_got_its_row(engine: AsyncEngine) -> None:
    before = time.monotonic()
    stream = engine.generate([[5], [6]], PARAMS)
    assert stream.scheduled_s is None
    await read(stream)
    assert stream.scheduled_s is not None
    assert before <= stream.scheduled_s <= time.monotonic()


async def test_a_reset_between_two_requests(engine: AsyncEngine) -> None:
    async def cached() -> int:
        outputs = await read(engine.generate([[5] * 33], PARAMS))
        await settled(engine)
        return max(output.num_cached_tokens for output in outputs)

    assert [await cached(), await cached()] == [0, 32]
    engine.reset_prefix_cache()
    assert [await cached(), await cached()] == [0, 32]
    await engine.drain(0)
    with pytest.raises(NotServing):
        engine.reset_prefix_cache()


async def test_a_full_queue_says_when_to_come_back_and_keeps_a_place_for_others(engine: AsyncEngine) -> None:
    runner = runner_of(engine)
    runner.gate = threading.Event()
    greedy, modest = Terms("greedy", reserved=0.5), Terms("modest", reserved=0.5)
    streams = [engine.generate([[i + 3]], PARAMS, terms=greedy) for i in range(8)]
    with pytest.raises(QueueFull) as caught:
        engine.generate([[1]], PARAMS, terms=greedy)
    assert caught.value.retry_after_s >= 1
    streams.append(engine.generate([[1]], PARAMS, terms=modest))
    runner.gate.set()
    for stream in streams:
        assert (await read(stream))[-1].finish_reason == "length"
    await settled(engine)


async def test_a_picture_comes_only_when_asked_for_and_once_per_asking(engine: AsyncEngine) -> None:
    pictures: list[Picture] = []
    posted: list[object] = []
    engine.add_listener(lambda delivery: pictures.append(delivery.picture) if delivery.picture else None)
    post = engine._loop.post
    engine._loop.post = lambda command: (posted.append(command), post(command))[1]  # type: ignore[method-assign]
    await read(engine.generate([[5, 6, 7]], SamplingParams(max_tokens=4, ignore_eos=True)))
    assert not pictures
    posted.clear()
    for _ in range(5):  # before the first has come
        engine.paint()
    assert len(posted) == 1
    for expected in (1, 2):
        for _ in range(200):
            if len(pictures) == expected:
                break
            await asyncio.sleep(0.01)
        assert len(pictures) == expected
        engine.paint()
    assert len(pictures[0].cells) == 16


async def test_an_engine_that_is_not_there_is_not_asked() -> None:
    engine = AsyncEngine(EngineConfig(), parts)
    engine.paint()
    assert not engine._painting
