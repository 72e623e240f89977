"""One step of the scheduler: what is planned for it while it is built and in flight, and what came of it.

Knows sequences and the rows of a batch; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.batch import NewRow, NewTokens, RowOutput, ScheduledRow
from engine.beam import Finished
from engine.outputs import FinishReason, PromptLogprobs, SequenceOutput, TokenLogprobs
from engine.sequence import Sequence
from engine.stats import RequestStats

NOT_SCORED = range(0)


class Changes(NamedTuple):
    """What the world outside must learn: per stream id the outputs of its sequences, who ended, and which streams got
    their first row, when."""

    outputs: tuple[tuple[int, tuple[SequenceOutput, ...]], ...] = ()
    finished: tuple[RequestStats, ...] = ()
    started: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Collected:
    """Changes while they are being made."""

    now: float
    outputs: dict[int, list[SequenceOutput]] = field(default_factory=dict)
    finished: list[RequestStats] = field(default_factory=list)
    started: list[tuple[int, float]] = field(default_factory=list)

    def tell(
        self,
        sequence: Sequence,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[float, ...] = (),
        top_logprobs: tuple[TokenLogprobs, ...] | None = None,
        finish_reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: str | None = None,
        error_param: str | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        embedding: bytes | None = None,
    ) -> None:
        """Add an output of the sequence."""
        request = sequence.request
        output = SequenceOutput(
            prompt_index=request.prompt_index,
            choice_index=sequence.choice_index,
            token_ids=token_ids,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            finish_reason=finish_reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
            error_param=error_param,
            prompt_logprobs=() if prompt_logprobs is None else (prompt_logprobs,),
            embedding=embedding,
        )
        self._add(request.stream_id, output)

    def tell_drawn(
        self, sequence: Sequence, row: RowOutput, finish_reason: FinishReason | None, stop_token_id: int | None
    ) -> None:
        """Add what a row has drawn. As `tell`, for what happens to every sequence in every step."""
        request = sequence.request
        output = SequenceOutput(
            request.prompt_index,
            sequence.choice_index,
            row.token_ids,
            row.logprobs,
            row.top_logprobs,
            finish_reason,
            stop_token_id,
            request.num_cached_tokens or 0,
        )
        if row.prompt_logprobs is not None:
            output = output._replace(prompt_logprobs=(row.prompt_logprobs,))
        self._add(request.stream_id, output)

    def _add(self, stream_id: int, output: SequenceOutput) -> None:
        told = self.outputs.get(stream_id)
        if told is None:
            self.outputs[stream_id] = [output]
        else:
            told.append(output)

    def tell_found(self, choice: Sequence, found: Finished) -> None:
        """What a beam search has found for a choice: all of its output at once."""
        hypothesis = found.hypothesis
        choice.token_ids += hypothesis.token_ids
        self.tell(
            choice,
            token_ids=hypothesis.token_ids,
            logprobs=hypothesis.logprobs,
            top_logprobs=hypothesis.alternatives or None,
            finish_reason=found.reason,
            stop_token_id=hypothesis.token_ids[-1] if found.reason == "stop" else None,
        )

    def freeze(self) -> Changes:
        outputs = tuple([(stream_id, tuple(told)) for stream_id, told in self.outputs.items()])
        return Changes(outputs, tuple(self.finished), tuple(self.started))


@dataclass(slots=True)
class StepPlan:
    """A step while it is planned, then while it is in flight. sequences: one for each of `rows`."""

    now: float
    budget: int
    rows: list[ScheduledRow] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    new_tokens: list[NewTokens] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)  # will run from the next step on
    started: list[tuple[int, float]] = field(default_factory=list)  # streams that got a row, and when
    overflow: list[Sequence] = field(default_factory=list)  # siblings without a row: to the front of waiting
    num_decoding: int = 0
    num_prompt_tokens: int = 0
    num_decode_tokens: int = 0
    num_recomputed_tokens: int = 0
    step_id: int = 0

    def add(self, sequence: Sequence, num_tokens: int, logits_from: int | None = None) -> bool:
        """Schedule tokens of a sequence that has a row and slots; True if it samples. With logits_from it computes
        nothing itself: the tokens are those of that other row, in the same step or before."""
        start = sequence.position
        scored = NOT_SCORED
        if logits_from is None:
            logits_from = len(self.rows)
            if start < sequence.num_prompt_tokens or start < sequence.high_water:
                scored = sequence.scored_in(start, start + num_tokens)
                self._count(sequence, start, start + num_tokens)
            else:  # what a text's next token is
                self.num_decode_tokens += num_tokens
            self.budget -= num_tokens
            computed, computes = start, num_tokens
        else:
            computed, computes = start + num_tokens, 0
        samples = sequence.schedule(num_tokens)
        assert sequence.row is not None
        self.rows.append(ScheduledRow(sequence.row, computed, computes, logits_from if samples else None, scored))
        self.sequences.append(sequence)
        return samples

    def _count(self, sequence: Sequence, start: int, end: int) -> None:
        known = max(start, sequence.high_water)
        decode = max(0, end - max(known, sequence.num_prompt_tokens))
        self.num_decode_tokens += decode
        self.num_prompt_tokens += end - start - decode
        self.num_recomputed_tokens += min(end, known) - start

    def take_forked(self) -> list[Sequence]:
        forked, self.forked = self.forked, []
        return forked

    def tell_new_row(self, sequence: Sequence) -> None:
        """The runner shall know the row that the sequence has taken."""
        assert sequence.row is not None
        request = sequence.request
        sequence.num_told_tokens = len(sequence.token_ids)
        new = NewRow(
            row=sequence.row,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            block_tables=tuple(map(tuple, sequence.block_tables)),
            params=request.params,
            seed_key=sequence.seed_key,
            eos_token_ids=request.eos_token_ids,
            adapter=request.adapter_index,
        )
        self.new_rows.append(new)

    def tell_tokens(self, beam: Sequence) -> None:
        """The runner does not choose a beam search's tokens: it is told the new ones, or of a new row."""
        told = beam.num_told_tokens
        if not told:
            self.tell_new_row(beam)
        elif told < len(beam.token_ids):
            assert beam.row is not None
            self.new_tokens.append(NewTokens(beam.row, told, tuple(beam.token_ids[told:])))
            beam.num_told_tokens = len(beam.token_ids)
