"""The choices of one HTTP request on their way out: each choice's `Assembler` (engine/text.py), the usage they add up
to, and the word to the engine when a choice has all it needs.

Knows no HTTP and no JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.outputs import RequestFailed, SequenceOutput
from engine.sampling_params import SamplingParams
from engine.text import Assembler, Piece
from engine.tokenizer import StopStrings, Tokenizer
from server.engine_port import Generation
from server.observe import Observer


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request: each prompt once, the accepted tokens of all choices.

    num_reasoning_tokens: of the completion tokens, those that were thinking; None where nobody counts them."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int | None = None

    def to_wire(self) -> dict[str, object]:
        """OpenAI's usage object."""
        wire: dict[str, object] = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }
        if self.num_reasoning_tokens is not None:
            wire["completion_tokens_details"] = {"reasoning_tokens": self.num_reasoning_tokens}
        return wire


class Answer:
    """The choices of one HTTP request; choice index = prompt_index * n + choice_index.

    echo: per prompt, text that goes before each of its choices; empty for none."""

    def __init__(
        self,
        stream: Generation,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_lens: Sequence[int],
        *,
        observer: Observer,
        stops: StopStrings | None = None,
        echo: Sequence[str] = (),
    ) -> None:
        self.stream = stream
        self._n = params.n
        self._prompt_lens = prompt_lens
        self._observer = observer
        self._echo = {p * params.n + c: text for p, text in enumerate(echo) for c in range(params.n)}  # not sent yet
        self._num_cached: dict[int, int] = {}
        stops = stops or (StopStrings(params.stop) if params.stop else None)
        self._assemblers = [Assembler(tokenizer, params, stops) for _ in range(len(prompt_lens) * params.n)]
        self._closed = False
        self._failed = False

    @property
    def num_choices(self) -> int:
        return len(self._assemblers)

    def take(self, outputs: Sequence[SequenceOutput]) -> list[tuple[int, Piece]]:
        """(choice index, piece) in the order they may leave. Raises RequestFailed."""
        taken: list[tuple[int, Piece]] = []
        for output in outputs:
            index = output.prompt_index * self._n + output.choice_index
            assembler = self._assemblers[index]
            before = assembler.num_tokens
            try:
                pieces = assembler.feed(output)
            except RequestFailed:
                self._failed = True
                raise
            if self._echo and pieces and (echo := self._echo.pop(index, None)) is not None:
                pieces[0] = pieces[0]._replace(text=echo + pieces[0].text)
            taken.extend([(index, piece) for piece in pieces])
            self._num_cached[output.prompt_index] = output.num_cached_tokens
            if assembler.finish_reason is not None and output.finish_reason is None:
                self.stream.finish(output.prompt_index, output.choice_index)
            accepted = assembler.num_tokens - before
            self._observer.took(index, accepted, len(output.token_ids) - accepted, assembler.finish_reason)
        return taken

    def close(self) -> None:
        """The reader leaves, or has all it wants: the engine stops what is left, usage is counted. Idempotent."""
        self.stream.close()
        if not self._closed:
            self._closed = True
            usage = self.usage()
            self._observer.ended(
                usage.num_prompt_tokens,
                usage.num_completion_tokens,
                usage.num_cached_tokens,
                num_unfinished=sum(assembler.finish_reason is None for assembler in self._assemblers),
                failed=self._failed,
            )

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=sum(self._prompt_lens),
            num_completion_tokens=sum(assembler.num_tokens for assembler in self._assemblers),
            num_cached_tokens=sum(self._num_cached.values()),
        )
