"""From sampled token ids to text that may leave: one assembler per choice, the same for streamed and plain answers.

An `Assembler` detokenizes, looks for stop strings, keeps the logprobs beside the text and counts what it accepted;
`Answer` holds the assemblers of one HTTP request and tells the engine when a choice has all it needs. Whatever the
engine's split into deliveries, the joined text, the tokens counted and the finish reason are the same.

Knows no HTTP and no JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.outputs import FinishReason, RequestFailed, SequenceOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.tokenizer import Detokenizer, StopMatcher, StopStrings, Tokenizer
from server.engine_port import Generation
from server.observe import Observer


class TokenEntry(NamedTuple):
    """One accepted token's logprob. text_offset: characters of generated text before it."""

    token_id: int
    logprob: float
    top: TokenLogprobs | None
    text_offset: int


class Piece(NamedTuple):
    """What one choice may send now. finish_reason is set on its last piece only."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None


class Assembler:
    """One choice. After `finish_reason` is set it accepts nothing more."""

    __slots__ = (
        "_detokenizer", "_include_stop", "_logprobs", "_matcher", "_min_tokens", "_num_chars",
        "finish_reason", "num_tokens",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, stops: StopStrings | None = None) -> None:
        """stops: params.stop compiled, where several choices share it."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._matcher = StopMatcher(stops or params.stop) if params.stop else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._logprobs = params.logprobs is not None
        self._num_chars = 0  # detokenized so far
        self.num_tokens = 0  # accepted so far
        self.finish_reason: FinishReason | None = None

    def feed(self, output: SequenceOutput) -> list[Piece]:
        """Pieces that may leave: one at most, or one per token where logprobs were asked for.

        Raises RequestFailed if the engine gave the sequence up."""
        if output.finish_reason in ("error", "abort"):
            raise RequestFailed(output.error or "The request was aborted.")
        if self.finish_reason is not None:
            return []
        if self._matcher is not None or self._logprobs:
            return self._feed_each(output)
        token_ids = output.token_ids
        self.num_tokens += len(token_ids)
        self.finish_reason = output.finish_reason
        text = self._detokenizer.feed(token_ids if output.stop_token_id is None else token_ids[:-1])
        if self.finish_reason is not None:
            text += self._detokenizer.finish()
        elif not text:
            return []
        return [Piece(text, (), self.finish_reason)]

    def _feed_each(self, output: SequenceOutput) -> list[Piece]:
        """Token by token, so that the count ends with the token that completes a stop string."""
        pieces: list[Piece] = []
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            offset = self._num_chars
            is_text = position < last or output.stop_token_id is None
            self.num_tokens += 1
            text = self._advance(self._detokenizer.feed((token_id,)) if is_text else "")
            if position == last and self.finish_reason is None and output.finish_reason is not None:
                text += self._flush(output.finish_reason)
            entries = (self._entry(output, position, offset),) if self._logprobs else ()
            pieces.append(Piece(text, entries, self.finish_reason))
            if self.finish_reason is not None:
                break
        if not output.token_ids and output.finish_reason is not None:
            pieces.append(Piece(self._flush(output.finish_reason), (), self.finish_reason))
        return pieces if self._logprobs else _merged(pieces)

    def _advance(self, text: str) -> str:
        """Through the stop search; sets finish_reason on a hit. Stop strings count only past min_tokens."""
        self._num_chars += len(text)
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            return text
        safe, hit = self._matcher.feed(text)
        return safe + self._hit() if hit else safe

    def _flush(self, reason: FinishReason) -> str:
        """All that is held back, at the end of the tokens."""
        text = self._advance(self._detokenizer.finish())
        if self._matcher is not None and self.finish_reason is None:
            text += self._matcher.finish()
            if self._matcher.matched is not None:
                return text + self._hit()
        self.finish_reason = self.finish_reason or reason
        return text

    def _hit(self) -> str:
        self.finish_reason = "stop"
        assert self._matcher is not None
        return (self._matcher.matched or "") if self._include_stop else ""

    def _entry(self, output: SequenceOutput, position: int, offset: int) -> TokenEntry:
        top = output.top_logprobs[position] if output.top_logprobs is not None else None
        return TokenEntry(output.token_ids[position], output.logprobs[position], top, offset)


def _merged(pieces: list[Piece]) -> list[Piece]:
    if not pieces:
        return []
    text = "".join(piece.text for piece in pieces)
    reason = pieces[-1].finish_reason
    return [Piece(text, (), reason)] if text or reason is not None else []


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one HTTP request: each prompt once, the accepted tokens of all choices."""

    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int

    def to_wire(self) -> dict[str, object]:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }


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
