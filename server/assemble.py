"""The choices of one HTTP request on their way out: each choice's `Assembler` (engine/text.py), the usage they add up
to, and the word to the engine when a choice has all it needs.

Knows no HTTP and no JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from engine.outputs import RequestFailed, SequenceOutput
from engine.sampling_params import SamplingParams
from engine.text import Assembler, Piece, StopGate
from engine.tokenizer import StopStrings, Tokenizer
from server.engine_port import Generation
from server.observe import Observer
from server.shown_prompt import ShownPrompt

T = TypeVar("T")


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

    prompts: how each prompt is shown, for the logprobs that the engine brings of them; empty where none is.
    new_stop_gate: makes one per choice, where stop strings do not count in all of its text.
    num_kept: of the params.n choices per prompt so many are told, the best by the mean logprob of their tokens; None:
    all."""

    def __init__(
        self,
        stream: Generation,
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_lens: Sequence[int],
        *,
        observer: Observer,
        stops: StopStrings | None = None,
        new_stop_gate: Callable[[], StopGate] | None = None,
        prompts: Sequence[ShownPrompt] = (),
        num_kept: int | None = None,
    ) -> None:
        self.stream = stream
        self._n = params.n
        self._max_tokens = params.max_tokens
        self._prompt_lens = prompt_lens
        self._observer = observer
        self._prompts = prompts
        self._num_kept = num_kept
        self.num_prompt_logprobs = 0  # that the engine has brought so far
        self._num_cached: dict[int, int] = {}
        stops = stops or (StopStrings(params.stop) if params.stop else None)
        before = [prompt.num_chars for prompt in prompts] or [0] * len(prompt_lens)
        self._assemblers = [
            Assembler(
                tokenizer,
                params,
                stops,
                num_chars_before=num_chars,
                stop_gate=new_stop_gate() if stops is not None and new_stop_gate is not None else None,
            )
            for num_chars in before
            for _ in range(params.n)
        ]
        self._closed = False
        self._failed = False

    @property
    def num_choices(self) -> int:
        return len(self._assemblers)

    def num_echoed(self, index: int) -> int:
        """Logprobs of prompt tokens that the first event of a choice tells."""
        return self._prompts[index // self._n].num_echoed if self._prompts else 0

    def take(self, outputs: Sequence[SequenceOutput]) -> list[tuple[int, Piece]]:
        """(choice index, piece) in the order they may leave. Raises RequestFailed."""
        taken: list[tuple[int, Piece]] = []
        for output in outputs:
            if output.prompt_logprobs and self._prompts:
                self._prompts[output.prompt_index].take(output.prompt_logprobs)
                self.num_prompt_logprobs += sum(len(chunk.logprobs) for chunk in output.prompt_logprobs)
        for output in outputs:
            index = output.prompt_index * self._n + output.choice_index
            assembler = self._assemblers[index]
            before = assembler.num_tokens
            try:
                pieces = assembler.feed(output)
            except RequestFailed:
                self._failed = True
                raise
            for piece in pieces:
                taken.append((index, piece))
            self._num_cached[output.prompt_index] = output.num_cached_tokens
            if assembler.finish_reason is not None and output.finish_reason is None:
                self.stream.finish(output.prompt_index, output.choice_index)
            accepted = assembler.num_tokens - before
            self._observer.took(index, accepted, len(output.token_ids) - accepted, assembler.finish_reason)
        return taken

    def kept(self, pieces: Sequence[T]) -> list[T]:
        """What belongs to the choices that are told, of one item per choice: with best_of the best of each prompt,
        the best first."""
        if self._num_kept is None:
            return list(pieces)
        kept = []
        for start in range(0, len(pieces), self._n):
            ranking = sorted(range(start, start + self._n), key=self._mean_logprob, reverse=True)
            kept += [pieces[index] for index in ranking[: self._num_kept]]
        return kept

    def _mean_logprob(self, index: int) -> float:
        assembler = self._assemblers[index]
        return assembler.logprob_sum / max(assembler.num_tokens, 1)

    def close(self) -> None:
        """The reader leaves, or has all it wants: the engine stops what is left, usage is counted. Idempotent."""
        self.stream.close()
        if not self._closed:
            self._closed = True
            usage = self.usage()
            lengths = [assembler.num_tokens for assembler in self._assemblers]
            for start in range(0, len(lengths), self._n):
                self._observer.prompt_ended(lengths[start : start + self._n], self._max_tokens)
            self._observer.ended(
                usage.num_prompt_tokens,
                usage.num_completion_tokens,
                usage.num_cached_tokens,
                num_unfinished=sum(assembler.finish_reason is None for assembler in self._assemblers),
                failed=self._failed,
                scheduled_s=self.stream.scheduled_s,
            )

    def usage(self) -> Usage:
        return Usage(
            num_prompt_tokens=sum(self._prompt_lens),
            num_completion_tokens=sum(assembler.num_tokens for assembler in self._assemblers),
            num_cached_tokens=sum(self._num_cached.values()),
        )
