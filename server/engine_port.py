"""What the front of the house needs from an engine, as a protocol: `engine.async_engine.AsyncEngine` is the real
one, tests bring fakes. Nothing here imports torch, so routes and their tests load in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from engine.outputs import Delivery, ModelInfo, Phase, SequenceOutput
from engine.progress import Progress
from engine.sampling_params import SamplingParams, StructuredOutput
from engine.terms import NO_TERMS, Terms
from engine.tokenizer import Tokenizer


class Generation(Protocol):
    """Outputs of one HTTP request; see `engine.stream.GenerationStream`."""

    @property
    def scheduled_s(self) -> float | None:
        """time.monotonic() when the first of it got a row, once that is known."""

    def __aiter__(self) -> Generation: ...

    async def __anext__(self) -> tuple[SequenceOutput, ...]: ...

    def pass_to(self, sink: Callable[[tuple[SequenceOutput, ...]], bool]) -> None:
        """`sink` takes what comes while the reader waits, without waking it."""

    def finish(self, prompt_index: int, choice_index: int) -> None:
        """The reader has all it wants of this sequence."""

    def close(self) -> None:
        """The reader leaves; idempotent."""


class Engine(Protocol):
    """One model. All methods are called on the event loop."""

    @property
    def phase(self) -> Phase: ...

    @property
    def hung(self) -> bool:
        """True while a step takes longer than the configured limit."""

    @property
    def progress(self) -> Progress:
        """Of the start."""

    @property
    def model_info(self) -> ModelInfo:
        """Raises NotServing before the model is loaded."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises NotServing before the model is loaded."""

    async def start(self) -> None:
        """Raises StartError."""

    async def drain(self, grace_s: float) -> None: ...

    async def stop(self) -> None: ...

    async def wait_dead(self) -> None:
        """Returns when the engine has died of an error of its own."""

    def add_listener(self, callback: Callable[[Delivery], None]) -> None: ...

    def reset_prefix_cache(self) -> None:
        """Requests that come from now on find nothing of what was computed before. Raises NotServing."""

    def paint(self) -> None:
        """A delivery that comes soon will have a picture; none does while the engine starts or is dead."""

    async def compile(self, structured: StructuredOutput, client: str = "") -> bool:
        """Make the grammar of a text's form ready, before `generate` is called with it; True if it was. client: who
        asks; clients take turns.

        Raises InvalidParameter for one that is wrong or too costly, QueueFull, NotServing."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        adapter: str = "",
        label: str = "",
        terms: Terms = NO_TERMS,
    ) -> Generation:
        """adapter: name of a configured one, "" for the base model. Raises InvalidParameter, QueueFull, NotServing or
        RequestTimedOut."""
