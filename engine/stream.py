"""`GenerationStream`: the outputs of one HTTP request, as an async iterator on the event loop.

What arrives while the reader is busy is merged, so that a slow reader gets fewer, larger items. What arrives while it
waits need not wake it: a sink may take it on the spot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from engine.outputs import FinishReason, SequenceOutput
from engine.terms import NO_TERMS, Terms

Key = tuple[int, int]  # (prompt_index, choice_index)
Sink = Callable[[tuple[SequenceOutput, ...]], bool]


class GenerationStream:
    """Yields tuples of SequenceOutput, at most one per sequence; ends after the last finish_reason.

    The reader may `finish` one sequence (a stop string was found) and must `close` in the end, however it ends."""

    def __init__(
        self,
        stream_id: int,
        prompt_lens: Mapping[int, int],
        n: int,
        *,
        on_abort: Callable[[GenerationStream, Key | None], None],
        label: str = "",
        terms: Terms = NO_TERMS,
    ) -> None:
        self.stream_id = stream_id
        self.label = label
        self.terms = terms
        self.scheduled_s: float | None = None  # time.monotonic when the first of it got a row
        self._on_abort = on_abort
        self._open: set[Key] = {(p, c) for p in prompt_lens for c in range(n)}  # no finish_reason yet
        self._not_started = {key: prompt_lens[key[0]] for key in self._open}  # no output yet -> prompt tokens
        self._started = (0, 0)  # sequences and prompt tokens, since the engine last asked
        self._pending: dict[Key, list[SequenceOutput]] = {}
        self._waiter: asyncio.Future[None] | None = None  # a bare future: an Event costs 2 us more per token
        self._sink: Sink | None = None
        self._fault: Exception | None = None  # what the sink raised

    @property
    def ended(self) -> bool:
        """True when nothing more will arrive."""
        return not self._open

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> tuple[SequenceOutput, ...]:
        while not self._pending and self._fault is None:
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._fault is not None:
            raise self._fault
        pending, self._pending = self._pending, {}
        return _merged(pending)

    def pass_to(self, sink: Sink) -> None:
        """From now on `sink` is given what comes while the reader waits, unless it ends a sequence: waking a task for
        every token costs more than all else that is done with it.

        It runs in the engine's delivery, so it must not take long. False: it has not touched the outputs, they wake
        the reader. What it raises, the reader's iteration raises. It may call `finish` and `close`."""
        self._sink = sink

    def finish(self, prompt_index: int, choice_index: int) -> None:
        """The reader has all it wants of this sequence: nothing more of it is computed or yielded."""
        key = (prompt_index, choice_index)
        self._pending.pop(key, None)
        if key in self._open:
            self._open.discard(key)
            self._start(key)
            self._on_abort(self, key)
        self._wake()

    def close(self) -> None:
        """The reader leaves; whatever is left is aborted. May be called again."""
        self._pending.clear()
        if self._open:
            for key in self._open:
                self._start(key)
            self._open.clear()
            self._on_abort(self, None)
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # -- the engine's side --------------------------------------------------------------------------------------

    def put(self, outputs: tuple[SequenceOutput, ...]) -> None:
        """One delivery: `add` and `flush`."""
        self.add(outputs)
        self.flush()

    def add(self, outputs: tuple[SequenceOutput, ...]) -> None:
        """Keep outputs for the next `flush`; those of one sequence are merged."""
        for output in outputs:
            key = (output.prompt_index, output.choice_index)
            if key not in self._open:
                continue  # finished or closed while this was on its way
            if key in self._pending:
                self._pending[key].append(output)
            else:
                self._pending[key] = [output]
            if key in self._not_started:
                self._start(key)
            if output.finish_reason is not None:
                self._open.discard(key)

    def flush(self) -> None:
        """Hand on what was added, to the sink or to the reader."""
        waiter = self._waiter
        if waiter is None or waiter.done():
            return  # it is busy and will look for more
        if self._sink is None or not self._pending or not self._pour(self._sink):
            self._wake()

    def _pour(self, sink: Sink) -> bool:
        """Whether the sink has taken all that is pending."""
        pending = self._pending
        outputs = _merged(pending)
        for output in outputs:
            if output.finish_reason is not None:
                return False
        self._pending = {}
        try:
            taken = sink(outputs)
        except Exception as error:
            self._fault = error
            return False
        if not taken:
            self._pending = pending
        return taken

    def fail(self, message: str, reason: FinishReason = "error") -> None:
        """End every open sequence with an error, or the time that is over."""
        self.put(tuple(SequenceOutput(p, c, finish_reason=reason, error=message) for p, c in sorted(self._open)))

    def take_started(self) -> tuple[int, int]:
        """(sequences, prompt tokens) that left the waiting state since the last call: first output or end."""
        started, self._started = self._started, (0, 0)
        return started

    def _start(self, key: Key) -> None:
        tokens = self._not_started.pop(key, None)
        if tokens is not None:
            self._started = (self._started[0] + 1, self._started[1] + tokens)


def _merged(pending: Mapping[Key, list[SequenceOutput]]) -> tuple[SequenceOutput, ...]:
    return tuple([outputs[0] if len(outputs) == 1 else _merge(outputs) for outputs in pending.values()])


def _merge(outputs: list[SequenceOutput]) -> SequenceOutput:
    last = outputs[-1]
    top = None
    if last.top_logprobs is not None:
        top = tuple(t for output in outputs for t in output.top_logprobs or ())
    return last._replace(
        token_ids=tuple(t for output in outputs for t in output.token_ids),
        logprobs=tuple(p for output in outputs for p in output.logprobs),
        top_logprobs=top,
        embedding=next((output.embedding for output in outputs if output.embedding is not None), None),
        prompt_logprobs=tuple(chunk for output in outputs for chunk in output.prompt_logprobs),
    )
