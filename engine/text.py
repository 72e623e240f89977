"""From sampled token ids to text that may leave: one `Assembler` per choice, for HTTP and in-process use alike.

It detokenizes, looks for stop strings, keeps the logprobs beside the text and counts what it accepted. Whatever the
engine's split into deliveries, the joined text, the tokens counted and the finish reason are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from engine.outputs import (
    FinishReason,
    RequestAtFault,
    RequestFailed,
    RequestTimedOut,
    SequenceOutput,
    TokenLogprobs,
)
from engine.sampling_params import SamplingParams
from engine.thinking import ThinkingGate
from engine.tokenizer import Detokenizer, StopMatcher, StopStrings, Tokenizer


class TokenEntry(NamedTuple):
    """One accepted token's logprob (None for the first token of an echoed prompt). text_offset: characters of the
    choice's text before it."""

    token_id: int
    logprob: float | None
    top: TokenLogprobs | None
    text_offset: int


class Piece(NamedTuple):
    """What one choice may send now. finish_reason is set on its last piece only.

    token_ids: those accepted since the last piece; their text may be held back, so text and ids need not match.
    stop_string: the one that ended the text, on the last piece."""

    text: str
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()
    stop_string: str | None = None


class StopGate(Protocol):
    """Tells in which stretches of one choice's text, behind its thinking, stop strings count."""

    def feed(self, text: str) -> Sequence[tuple[str, bool]]:
        """(text, whether stop strings count in it): what is certain now, in order; the rest is held back."""

    def finish(self) -> Sequence[tuple[str, bool]]:
        """What was held back, once nothing follows."""


class Assembler:
    """One choice. After `finish_reason` is set it accepts nothing more."""

    __slots__ = (
        "_detokenizer", "_gate", "_include_stop", "_logprobs", "_matcher", "_min_tokens", "_num_chars", "_stop_gate",
        "_stops", "_unsent", "finish_reason", "logprob_sum", "num_tokens",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        stops: StopStrings | None = None,
        *,
        num_chars_before: int = 0,
        stop_gate: StopGate | None = None,
    ) -> None:
        """stops: params.stop compiled, where several choices share it. num_chars_before: of an echo that goes before
        the text; offsets count them. stop_gate: where stop strings do not count in all of the text."""
        self._detokenizer = Detokenizer(
            tokenizer, skip_special_tokens=params.skip_special_tokens, shown=params.shown_special_tokens
        )
        self._stops = stops or params.stop
        self._matcher = StopMatcher(self._stops) if params.stop else None
        self._stop_gate = stop_gate if params.stop else None
        self._gate = ThinkingGate(params.reasoning) if params.stop and params.reasoning else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._logprobs = params.logprobs is not None
        self._num_chars = num_chars_before  # and what is detokenized so far
        self._unsent: list[int] = []  # accepted, and in no piece yet
        self.num_tokens = 0  # accepted so far
        self.logprob_sum = 0.0  # of those, where logprobs were asked for
        self.finish_reason: FinishReason | None = None

    def feed(self, output: SequenceOutput) -> list[Piece]:
        """Pieces that may leave: one at most, or one per token where logprobs were asked for.

        Raises RequestFailed if the engine gave the sequence up, RequestAtFault if it is the request's own fault,
        RequestTimedOut."""
        if output.finish_reason == "timeout":
            raise RequestTimedOut
        if output.finish_reason in ("error", "abort"):
            if output.error_param is not None:
                raise RequestAtFault(output.error_param, output.error or "The request cannot be served.")
            raise RequestFailed(output.error or "The request was aborted.")
        if self.finish_reason is not None:
            return []
        if self._matcher is not None or self._logprobs:
            pieces = self._feed_each(output)
            if pieces and self._matcher is not None and self._matcher.matched is not None:
                pieces[-1] = pieces[-1]._replace(stop_string=self._matcher.matched)
            return pieces
        token_ids = output.token_ids
        self.num_tokens += len(token_ids)
        self.logprob_sum += sum(output.logprobs)
        self.finish_reason = output.finish_reason
        text = self._detokenizer.feed(token_ids if output.stop_token_id is None else token_ids[:-1])
        if self.finish_reason is not None:
            text += self._detokenizer.finish()
        elif not text:
            self._unsent += token_ids
            return []
        return [Piece(text, (), self.finish_reason, self._take(token_ids))]

    def _feed_each(self, output: SequenceOutput) -> list[Piece]:
        """Token by token, so that the count ends with the token that completes a stop string."""
        pieces: list[Piece] = []
        last = len(output.token_ids) - 1
        for position, token_id in enumerate(output.token_ids):
            offset = self._num_chars
            is_text = position < last or output.stop_token_id is None
            self.num_tokens += 1
            self.logprob_sum += output.logprobs[position] if output.logprobs else 0.0
            text = self._advance(self._detokenizer.feed((token_id,)) if is_text else "")
            if position == last and self.finish_reason is None and output.finish_reason is not None:
                text += self._flush(output.finish_reason)
            entries = (self._entry(output, position, offset),) if self._logprobs else ()
            pieces.append(Piece(text, entries, self.finish_reason, (token_id,)))
            if self.finish_reason is not None:
                break
        if not output.token_ids and output.finish_reason is not None:
            pieces.append(Piece(self._flush(output.finish_reason), (), self.finish_reason))
        return pieces if self._logprobs else self._merged(pieces)

    def _merged(self, pieces: list[Piece]) -> list[Piece]:
        """One piece, or none while there is nothing to send."""
        text = "".join(piece.text for piece in pieces)
        token_ids = tuple(token_id for piece in pieces for token_id in piece.token_ids)
        if not text and self.finish_reason is None:
            self._unsent += token_ids
            return []
        return [Piece(text, (), self.finish_reason, self._take(token_ids))]

    def _take(self, token_ids: tuple[int, ...]) -> tuple[int, ...]:
        unsent, self._unsent = self._unsent, []
        return (*unsent, *token_ids) if unsent else token_ids

    def _advance(self, text: str) -> str:
        """Through the gate of the thinking and the stop search; sets finish_reason on a hit."""
        self._num_chars += len(text)
        if self._gate is None:
            return self._behind(text)
        thinking, text = self._gate.feed(text)
        return thinking + self._behind(text)

    def _behind(self, text: str) -> str:
        return self._search(text) if self._stop_gate is None else self._sift(self._stop_gate.feed(text))

    def _sift(self, stretches: Sequence[tuple[str, bool]]) -> str:
        sent = ""
        for text, counts in stretches:
            sent += self._search(text) if counts else self._let_go()
            if self.finish_reason is not None:
                break
            sent += "" if counts else text
        return sent

    def _let_go(self) -> str:
        """What the search has held back, where no stop string can go on."""
        assert self._matcher is not None
        text = self._matcher.finish()
        if self._matcher.matched is not None:
            return text + self._hit()
        self._matcher = StopMatcher(self._stops)
        return text

    def _search(self, text: str) -> str:
        """Stop strings count only past min_tokens."""
        if self._matcher is None or self.num_tokens <= self._min_tokens:
            return text
        safe, hit = self._matcher.feed(text)
        return safe + self._hit() if hit else safe

    def _flush(self, reason: FinishReason) -> str:
        """All that is held back, at the end of the tokens."""
        text = self._advance(self._detokenizer.finish())
        if self._gate is not None and self.finish_reason is None:
            text += self._behind(self._gate.finish())
        if self._stop_gate is not None and self.finish_reason is None:
            text += self._sift(self._stop_gate.finish())
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
