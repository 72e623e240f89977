"""`GenerationStream`: the outputs of one HTTP request, as an async iterator on the event loop.

What arrives while the reader is busy is merged, so that a slow reader gets fewer, larger items.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from engine.outputs import SequenceOutput

Key = tuple[int, int]  # (prompt_index, choice_index)


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
    ) -> None:
        self.stream_id = stream_id
        self.label = label
        self._on_abort = on_abort
        self._open: set[Key] = {(p, c) for p in prompt_lens for c in range(n)}  # no finish_reason yet
        self._not_started = {key: prompt_lens[key[0]] for key in self._open}  # no output yet -> prompt tokens
        self._started = (0, 0)  # sequences and prompt tokens, since the engine last asked
        self._pending: dict[Key, list[SequenceOutput]] = {}
        self._waiter: asyncio.Future[None] | None = None  # a bare future: an Event costs 2 us more per token

    @property
    def ended(self) -> bool:
        """True when nothing more will arrive."""
        return not self._open

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> tuple[SequenceOutput, ...]:
        while not self._pending:
            if self.ended:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pending, self._pending = self._pending, {}
        return tuple(outputs[0] if len(outputs) == 1 else _merge(outputs) for outputs in pending.values())

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
        for output in outputs:
            key = (output.prompt_index, output.choice_index)
            if key not in self._open:
                continue  # finished or closed while this was on its way
            self._pending.setdefault(key, []).append(output)
            self._start(key)
            if output.finish_reason is not None:
                self._open.discard(key)
        self._wake()

    def fail(self, message: str) -> None:
        """End every open sequence with an error."""
        self.put(tuple(SequenceOutput(p, c, finish_reason="error", error=message) for p, c in sorted(self._open)))

    def take_started(self) -> tuple[int, int]:
        """(sequences, prompt tokens) that left the waiting state since the last call: first output or end."""
        started, self._started = self._started, (0, 0)
        return started

    def _start(self, key: Key) -> None:
        tokens = self._not_started.pop(key, None)
        if tokens is not None:
            self._started = (self._started[0] + 1, self._started[1] + tokens)


def _merge(outputs: list[SequenceOutput]) -> SequenceOutput:
    last = outputs[-1]
    top = None
    if last.top_logprobs is not None:
        top = tuple(t for output in outputs for t in output.top_logprobs or ())
    return replace(
        last,
        token_ids=tuple(t for output in outputs for t in output.token_ids),
        logprobs=tuple(p for output in outputs for p in output.logprobs),
        top_logprobs=top,
        embedding=next((output.embedding for output in outputs if output.embedding is not None), None),
        prompt_logprobs=tuple(chunk for output in outputs for chunk in output.prompt_logprobs),
    )
