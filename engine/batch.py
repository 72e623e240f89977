"""What the scheduler hands the runner and gets back: picklable, no tensors, only deltas.

A running sequence owns a `row`, a small integer that is stable from admission to its end (or preemption). The
runner keeps per-row state (token ids, block tables, sampling parameters, penalty counts); a `ScheduledBatch`
says how that state changes before the step and what the step computes. A tensor-parallel rank could follow
from this object alone.

Positions: token i of a sequence has position i. A row computes tokens [num_computed, num_computed +
num_scheduled). Its sampled token, if any, goes to position num_computed + num_scheduled. The runner appends
sampled tokens to the row itself, so a later batch may schedule a token whose id the scheduler does not know yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from engine.outputs import PromptLogprobs, TokenLogprobs
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence starts (or resumes) on `row`; replaces whatever the row held."""

    row: int
    token_ids: tuple[int, ...]  # prompt and, after preemption or fork, the output so far
    num_prompt_tokens: int
    block_tables: tuple[tuple[int, ...], ...]  # per KV group
    params: SamplingParams
    seed_key: int  # uint64: hash of (seed, prompt index, choice index)
    eos_token_ids: tuple[int, ...]  # masked until min_tokens; () with ignore_eos
    adapter: int = 0  # place in LoraConfig.adapters, from 1; 0: none


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks of `row` from index `start` on are `block_ids` (appended, or replaced by copy-on-write)."""

    row: int
    group: int
    start: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of `row` from position `start` on that the runner has not sampled itself: a beam search chose them."""

    row: int
    start: int
    token_ids: tuple[int, ...]


class ScheduledRow(NamedTuple):
    """num_scheduled may be 0: a forked sibling that samples from another row's logits.

    logits_from: index into ScheduledBatch.rows whose last token's logits this row samples from; None: this row
    samples nothing in this step (a prompt chunk that is not the last).
    scored: positions among those computed whose logits tell the logprob of the prompt token that follows."""

    row: int
    num_computed: int
    num_scheduled: int
    logits_from: int | None
    scored: range = range(0)

    @property
    def end(self) -> int:
        """Tokens of the row that are computed behind the step."""
        return self.num_computed + self.num_scheduled


class ScheduledBatch(NamedTuple):
    """Order of application: freed_rows, new_rows, new_tokens, new_blocks, block_copies, then the forward over rows."""

    step_id: int
    freed_rows: tuple[int, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    new_tokens: tuple[NewTokens, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    block_copies: tuple[tuple[int, int], ...] = ()  # (source block, destination block), all layers
    rows: tuple[ScheduledRow, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(r.num_scheduled for r in self.rows)


class RowOutput(NamedTuple):
    """Tokens sampled for one scheduled row: 0 (chunk, or a beam search, whose candidates are the one entry of
    top_logprobs), 1, or more (speculation)."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None  # this row failed (non-finite logits); others are fine
    error_param: str | None = None  # the request's field that is to blame; None: the engine is
    ends: bool = False  # its grammar is complete: nothing can follow these tokens
    prompt_logprobs: PromptLogprobs | None = None  # one entry per scored position
    embedding: bytes | None = None  # float32, of a pooled prompt whose last token was computed


class StepOutput(NamedTuple):
    """One entry per ScheduledBatch.rows, in that order. forward_s, sampling_s: how long the device took for the model
    and for choosing tokens, seconds; None: it does not tell, or there was nothing of the kind."""

    step_id: int
    rows: tuple[RowOutput, ...] = ()
    forward_s: float | None = None
    sampling_s: float | None = None
