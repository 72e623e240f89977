"""`AsyncEngine`: the engine as the event loop sees it. Admission, streams, phases; no sequences, no blocks, no text.

All methods run on the event loop, except the callbacks that the engine thread hands over through
`call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from engine.admission import Admission
from engine.assembly import EngineParts, Plan, load_engine, plan
from engine.config import EngineConfig
from engine.limits import Limits, no_forms
from engine.loop import Abort, EngineLoop, Paint, ResetPrefixCache, Runner, Stop, Submit
from engine.outputs import (
    Delivery,
    EngineError,
    ModelInfo,
    NotServing,
    Phase,
    RequestTimedOut,
    SequenceOutput,
)
from engine.progress import Progress
from engine.sampling_params import InvalidParameter, SamplingParams, StructuredOutput
from engine.scheduler import Scheduler
from engine.sequence import Request
from engine.stream import GenerationStream
from engine.structured import GrammarStore
from engine.terms import NO_TERMS, Terms
from engine.tokenizer import Tokenizer

logger = logging.getLogger("pagemill.engine")


STOP_S = 10.0  # how long stop() waits for a step in progress


@dataclass(frozen=True, slots=True)
class _Known:
    """The parts of the engine that the event loop knows. The others are the engine thread's and end with it."""

    tokenizer: Tokenizer
    info: ModelInfo
    grammars: GrammarStore | None


class AsyncEngine:
    """One model, one engine thread. Life: start -> generate... -> drain -> stop."""

    def __init__(self, config: EngineConfig, load: Callable[[EngineConfig], EngineParts] | None = None) -> None:
        """load: makes the parts, in the engine thread; None: `load_engine`."""
        self.config = config
        self.progress = Progress()
        self._load = load or partial(load_engine, progress=self.progress)
        self._phase = Phase.STARTING
        self._known: _Known | None = None
        self._streams: dict[int, GenerationStream] = {}
        self._forms: dict[int, StructuredOutput] = {}  # of the streams that have one
        self._stream_ids = itertools.count(1)  # never reused: a late abort cannot hit a newer request
        self._listeners: list[Callable[[Delivery], None]] = []
        self._painting = False  # a picture was asked for and has not come
        self._outbox: deque[Delivery] = deque()  # on their way from the engine thread
        self._deadlines: dict[int, asyncio.TimerHandle] = {}  # of the streams that have one
        self._admission = Admission(config.scheduler, time.monotonic)  # what has not produced a token
        self._adapters = {"": 0} | {each.name: place for place, each in enumerate(config.lora.adapters, 1)}
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead = asyncio.Event()

    # -- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model in the engine thread and return when the first request may come.

        Raises StartError with one sentence if it cannot."""
        self._event_loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = self._event_loop.create_future()

        def settle(error: BaseException | None) -> None:
            if ready.cancelled():  # the server ends while the model loads; nobody waits for it any more
                return
            if ready.done():
                self._on_death(error)
            elif error is None:
                ready.set_result(None)
            else:
                ready.set_exception(error)

        self._loop = EngineLoop(
            self._load_parts,
            deliver=self._deliver,
            on_ready=lambda: self._hand(settle, None),
            on_death=lambda error: self._hand(settle, error),
        )
        self._loop.start()
        try:
            await ready
        except Exception:
            self._phase = Phase.DEAD
            raise
        if self._phase is Phase.STARTING:
            self._phase = Phase.READY

    def _load_parts(self) -> tuple[Runner, Scheduler]:
        parts = self._load(self.config)
        self._known = _Known(parts.tokenizer, parts.info, parts.grammars)
        return parts.runner, parts.scheduler

    def _hand(self, callback: Callable[..., None], *args: object) -> None:
        """Engine thread -> event loop; silent once the event loop is gone."""
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(callback, *args)

    def _deliver(self, delivery: Delivery) -> None:
        """In the engine thread."""
        self._outbox.append(delivery)
        self._hand(self._on_deliveries)

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, let what is in flight finish for `grace_s` seconds, end the rest with an error."""
        if self._phase in (Phase.STARTING, Phase.READY):
            self._phase = Phase.DRAINING
        try:
            await asyncio.wait_for(self._idle.wait(), grace_s)
        except TimeoutError:
            self._end_all("The server is shutting down.")

    async def stop(self) -> None:
        """End the engine thread; a step in progress is finished first (at most a few seconds are waited)."""
        self._end_all("The server is shutting down.")
        if self._phase is not Phase.DEAD:
            self._phase = Phase.DRAINING
        if self._known is not None and self._known.grammars is not None:
            self._known.grammars.close()
        self._loop.post(Stop())
        deadline = time.monotonic() + STOP_S
        while self._loop.is_alive() and time.monotonic() < deadline:  # noqa: ASYNC110  # a thread sets no asyncio.Event
            await asyncio.sleep(0.005)  # not in a worker thread: at the interpreter's end there are none

    # -- facts --------------------------------------------------------------------------------------------------

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def hung(self) -> bool:
        """True while one step takes longer than config.step_timeout_s."""
        started = self._loop.step_started_s if self._phase is not Phase.STARTING else None
        return started is not None and time.monotonic() - started > self.config.step_timeout_s

    @property
    def model_info(self) -> ModelInfo:
        return self._loaded.info

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded.tokenizer

    @property
    def _limits(self) -> Limits:
        loaded = self._loaded
        return Limits(loaded.info, self.config.scheduler.max_num_seqs, has_forms=loaded.grammars is not None)

    @property
    def _loaded(self) -> _Known:
        if self._known is None:
            raise NotServing("The model is still loading.")
        return self._known

    async def wait_dead(self) -> None:
        """Returns when the engine has died of an error of its own."""
        await self._dead.wait()

    def add_listener(self, callback: Callable[[Delivery], None]) -> None:
        """`callback` runs on the event loop after each delivery."""
        self._listeners.append(callback)

    # -- requests -----------------------------------------------------------------------------------------------

    async def compile(self, structured: StructuredOutput, client: str = "") -> bool:
        """Make the grammar of a text's form ready, beside the event loop and the engine thread; True if it was.
        Equal forms are compiled once. client: who asks; clients take turns.

        Raises InvalidParameter for one that is wrong or too costly, QueueFull, NotServing."""
        if self._phase is not Phase.READY:
            raise NotServing(f"The engine is {self._phase.value}.")
        grammars = self._loaded.grammars
        if grammars is None:
            raise no_forms(structured)
        return await grammars.compile(structured, client)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        adapter: str = "",
        label: str = "",
        terms: Terms = NO_TERMS,
    ) -> GenerationStream:
        """Admit one HTTP request (all prompts x params.n, whole or not at all) and return its stream of outputs.

        prompts: token ids; params.max_tokens None means what remains of max_model_len; label: the client's name
        for the request, only for logs; adapter: name of one in config.lora, "" for the base model. Raises
        InvalidParameter, QueueFull, NotServing or RequestTimedOut."""
        if self._phase is not Phase.READY:
            raise NotServing(f"The engine is {self._phase.value}.")
        self._limits.check(prompts, params)
        adapter_index = self._adapters.get(adapter)
        if adapter_index is None:
            raise InvalidParameter("model", f"There is no adapter {adapter[:80]!r} here.")
        now = time.monotonic()
        if terms.deadline_s is not None and terms.deadline_s <= now:
            raise RequestTimedOut
        self._admission.enter(len(prompts) * params.n, sum(map(len, prompts)) * params.n, terms)
        if params.structured is not None and self._loaded.grammars is not None:
            self._loaded.grammars.acquire(params.structured)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stream_id = next(self._stream_ids)
        stream = GenerationStream(
            stream_id,
            {i: len(p) for i, p in enumerate(prompts)},
            params.n,
            on_abort=self._abort,
            label=label,
            terms=terms,
        )
        requests = tuple(
            Request(
                stream_id=stream_id,
                prompt_index=index,
                token_ids=tuple(prompt),
                params=self._resolve(params, len(prompt)),
                seed=seed,
                eos_token_ids=self.model_info.eos_token_ids,
                cache_salt=cache_salt,
                adapter=adapter,
                adapter_index=adapter_index,
                arrival_s=now,
                terms=terms,
            )
            for index, prompt in enumerate(prompts)
        )
        self._streams[stream_id] = stream
        if params.structured is not None:
            self._forms[stream_id] = params.structured
        if terms.deadline_s is not None:
            late = asyncio.get_running_loop().call_later(terms.deadline_s - now, self._time_out, stream)
            self._deadlines[stream_id] = late
        self._idle.clear()
        self._loop.post(Submit(requests))
        return stream

    def _resolve(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        if params.max_tokens is not None:
            return params
        return replace(params, max_tokens=self.model_info.max_model_len - prompt_len)

    def _abort(self, stream: GenerationStream, sequence: tuple[int, int] | None) -> None:
        """Called by the stream when its reader stops a sequence or leaves."""
        self._loop.post(Abort(stream.stream_id, sequence))
        self._settle(stream)

    def reset_prefix_cache(self) -> None:
        """Requests that come from now on find nothing of what was computed before. Raises NotServing."""
        if self._phase is not Phase.READY:
            raise NotServing(f"The engine is {self._phase.value}.")
        self._loop.post(ResetPrefixCache())

    def paint(self) -> None:
        """A delivery will bring a picture, after the step in progress; none comes of an engine that is not there."""
        if self._phase in (Phase.READY, Phase.DRAINING) and self._known is not None and not self._painting:
            self._painting = True
            self._loop.post(Paint())

    def _time_out(self, stream: GenerationStream) -> None:
        """On the event loop, so that a step that hangs does not hold up the answer."""
        stream.fail(str(RequestTimedOut()), "timeout")
        self._loop.post(Abort(stream.stream_id))
        self._settle(stream)

    # -- deliveries ---------------------------------------------------------------------------------------------

    def _on_deliveries(self) -> None:
        """All that have come: where the event loop lags behind the steps, a stream's tokens of several steps leave
        together, so that it catches up."""
        touched: dict[int, GenerationStream] = {}
        deliveries: list[Delivery] = []
        while self._outbox:
            delivery = self._outbox.popleft()
            deliveries.append(delivery)
            if delivery.picture is not None:
                self._painting = False
            for stream_id, scheduled_s in delivery.started:
                stream = self._streams.get(stream_id)
                if stream is not None and stream.scheduled_s is None:
                    stream.scheduled_s = scheduled_s
            for stream_id, outputs in delivery.outputs:
                stream = self._streams.get(stream_id)
                if stream is not None:
                    stream.add(outputs)
                    touched[stream_id] = stream
        for stream in touched.values():
            stream.flush()
            self._settle(stream)
        for delivery in deliveries:
            for listener in self._listeners:
                listener(delivery)

    def _settle(self, stream: GenerationStream) -> None:
        """Keep the admission counts and the idle event true to the stream's state."""
        self._admission.start(*stream.take_started(), stream.terms)
        if stream.ended:
            self._streams.pop(stream.stream_id, None)
            if (late := self._deadlines.pop(stream.stream_id, None)) is not None:
                late.cancel()
            structured = self._forms.pop(stream.stream_id, None)
            if structured is not None and self._loaded.grammars is not None:
                self._loaded.grammars.release(structured)
            if not self._streams:
                self._idle.set()

    def _on_death(self, error: BaseException | None) -> None:
        logger.critical("the engine died", exc_info=error)
        self._phase = Phase.DEAD
        self._end_all("The engine died while computing this request.")
        self._dead.set()

    def _end_all(self, message: str) -> None:
        for stream in list(self._streams.values()):
            stream.fail(message)
            if self._phase is not Phase.DEAD:
                self._loop.post(Abort(stream.stream_id))
            self._settle(stream)


__all__ = ["AsyncEngine", "EngineError", "GenerationStream", "Plan", "SequenceOutput", "plan"]
