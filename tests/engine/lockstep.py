"""`ModelRunner` and `DeviceRunner` side by side on every batch that a real scheduler makes, each with a model and a KV
pool of its own, answers compared as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.assembly import EngineParts
from engine.batch import ScheduledBatch, StepOutput
from engine.config import SchedulerConfig
from engine.device import HostLane, Lane
from engine.device_runner import DeviceRunner, DeviceStepHandle, Graphs
from engine.kv.manager import KVCacheManager
from engine.outputs import SequenceOutput
from engine.runner import ModelRunner, StepHandle
from engine.sampling_params import SamplingParams, StructuredOutput
from engine.scheduler import Scheduler
from engine.sequence import Request
from engine.step import Changes

EOS = 2


@dataclass
class Handles:
    plain: StepHandle
    device: DeviceStepHandle

    def result(self) -> StepOutput:
        ours, wanted = self.device.result(), self.plain.result()
        assert ours.step_id == wanted.step_id
        for index, (one, other) in enumerate(zip(ours.rows, wanted.rows, strict=True)):
            assert one == other, f"row {index} of step {ours.step_id}"
        return ours


@dataclass
class Lockstep:
    plain: ModelRunner
    device: DeviceRunner

    def launch(self, batch: ScheduledBatch) -> Handles:
        return Handles(self.plain.launch(batch), self.device.launch(batch))


@dataclass(frozen=True)
class Pair:
    """One model, loaded twice. forms: grammars that both know."""

    plain: EngineParts
    device: EngineParts
    forms: tuple[StructuredOutput, ...] = ()

    def learn(self, forms: Sequence[StructuredOutput]) -> Pair:
        async def compile_all() -> None:
            for parts in (self.plain, self.device):
                assert parts.grammars is not None
                for form in forms:
                    await parts.grammars.compile(form)
                    parts.grammars.acquire(form)

        asyncio.run(compile_all())
        return Pair(self.plain, self.device, tuple(forms))

    def close(self) -> None:
        for parts in (self.plain, self.device):
            if parts.grammars is not None:
                parts.grammars.close()

    def runners(
        self, config: SchedulerConfig, max_model_len: int, *, lane: Lane | None = None, graphs: Graphs | None = None
    ) -> Lockstep:
        plain, device = self.plain.runner, self.device.runner
        assert isinstance(plain, ModelRunner)
        return Lockstep(
            ModelRunner(
                plain.backbone,
                plain.kv_cache,
                max_num_seqs=config.max_num_seqs,
                max_model_len=max_model_len,
                vocab_size=self.plain.info.vocab_size,
                grammars=self.plain.grammars,
            ),
            DeviceRunner(
                device.backbone,
                device.kv_cache,
                lane or HostLane(),
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=max_model_len,
                vocab_size=self.device.info.vocab_size,
                pipeline_depth=config.pipeline_depth or 1,
                grammars=self.device.grammars,
                graphs=graphs,
            ),
        )


@dataclass
class Text:
    outputs: list[SequenceOutput] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]


class Driver:
    """The loop, turn by turn, with every invariant checked on the way."""

    def __init__(
        self, runner: Lockstep, config: SchedulerConfig, num_blocks: int, max_model_len: int, *, caching: bool = True
    ) -> None:
        block_size = runner.device.kv_cache.block_size
        assert num_blocks <= runner.device.kv_cache.num_blocks
        manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(config, manager, max_model_len)
        self.runner = runner
        self.depth = config.pipeline_depth or 1
        self.texts: dict[tuple[int, int], Text] = {}  # stream, choice
        self.num_discarded = 0
        self._now = 0.0
        self._in_flight: deque[tuple[ScheduledBatch, Handles]] = deque()

    def add(self, prompt: Sequence[int], params: SamplingParams, *, seed: int = 0) -> int:
        stream = len({stream for stream, _ in self.texts})
        request = Request(stream, 0, prompt, params, seed=seed, eos_token_ids=(EOS,), arrival_s=self._now)
        self.texts.update({(stream, choice): Text() for choice in range(params.n)})
        self.scheduler.add(request)
        return stream

    def abort(self, stream: int) -> None:
        self._take(self.scheduler.abort(stream, now=self._now))

    def step(self) -> bool:
        """False when there was nothing to do."""
        self._now += 1.0
        batch = self.scheduler.schedule(self._now)
        if batch is not None:
            self._in_flight.append((batch, self.runner.launch(batch)))
        elif not self._in_flight:
            return False
        if batch is None or len(self._in_flight) >= self.depth:
            oldest, handle = self._in_flight.popleft()
            self._take(self.scheduler.update(oldest, handle.result(), self._now))
        self.scheduler.check()
        return True

    def run(self, max_steps: int = 5_000) -> None:
        """Until nothing is left; every sequence must have ended."""
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError("no end in sight: livelock")
        assert not self.scheduler.has_work
        assert all(text.finish_reason for text in self.texts.values())
        self.num_discarded = self.scheduler.step_stats().num_discarded_tokens_total

    def _take(self, changes: Changes) -> None:
        for stream, outputs in changes.outputs:
            for output in outputs:
                text = self.texts[stream, output.choice_index]
                assert text.finish_reason is None, "nothing follows a finish_reason"
                text.outputs.append(output)
                text.finish_reason = output.finish_reason
