"""A `Request` is one prompt with its parameters; it owns n `Sequence`s, one per choice.

Knows tokens, counters and time stamps; decides nothing about memory or order. One counter explains the rest:
a sequence's position (tokens whose K/V is written or being written) runs after its tokens.

    token_ids              prompt ............... output .....
    num_computed_tokens    |---- retired steps ----|
    num_scheduled_tokens                           |- steps in flight -|
    num_pending_tokens                                         sampled in flight, ids not known yet
"""

from __future__ import annotations

from collections.abc import Sequence as ReadOnly
from enum import Enum

from engine.outputs import FinishReason
from engine.sampling.philox import seed_key
from engine.sampling_params import SamplingParams
from engine.stats import RequestStats
from engine.terms import NO_TERMS, Terms


class SequenceStatus(Enum):
    WAITING = "waiting"  # in the queue, or a sibling whose prompt is not computed yet
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One prompt of one stream (an HTTP request with k prompts is k requests of one stream).

    stream_id: made by the server, never reused. seed: int64, drawn by the caller when the client named none.
    adapter: name of a configured one, "" for the base model; adapter_index: its place among them from 1, 0 for none.
    num_cached_tokens: prompt tokens found in the prefix cache at the first admission; None before it."""

    def __init__(
        self,
        stream_id: int,
        prompt_index: int,
        token_ids: ReadOnly[int],
        params: SamplingParams,
        *,
        seed: int,
        eos_token_ids: ReadOnly[int] = (),
        cache_salt: str = "",
        adapter: str = "",
        adapter_index: int = 0,
        arrival_s: float = 0.0,
        terms: Terms = NO_TERMS,
    ) -> None:
        self.stream_id = stream_id
        self.prompt_index = prompt_index
        self.params = params
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.adapter_index = adapter_index
        self.arrival_s = arrival_s
        self.terms = terms
        # a form may leave nothing but its end: it ends the text then, wanted or not
        ignores_eos = params.ignore_eos and params.structured is None
        self.eos_token_ids = () if ignores_eos else tuple(eos_token_ids)
        self.stop_ids = frozenset(self.eos_token_ids) | frozenset(params.stop_token_ids)
        self.num_cached_tokens: int | None = None
        self.sequences = tuple(
            Sequence(self, choice, list(token_ids), seed_key(seed, prompt_index, choice)) for choice in range(params.n)
        )


class Sequence:
    """One stream of tokens. The scheduler and the KV manager are the only writers."""

    __slots__ = (
        "block_names",
        "block_tables",
        "choice_index",
        "first_token_s",
        "high_water",
        "max_output_tokens",
        "num_charged",
        "num_claimed_blocks",
        "num_committed_blocks",
        "num_computed_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scheduled_tokens",
        "num_scored_tokens",
        "num_steps_in_flight",
        "num_told_tokens",
        "releasing",
        "request",
        "root_name",
        "row",
        "scheduled_s",
        "seed_key",
        "siblings",
        "status",
        "token_ids",
        "waits_for",
    )

    def __init__(self, request: Request, choice_index: int, token_ids: list[int], key: int) -> None:
        self.request = request
        self.choice_index = choice_index
        self.token_ids = token_ids
        self.num_prompt_tokens = len(token_ids)
        self.max_output_tokens = 1  # set by Scheduler.add, which knows max_model_len
        self.seed_key = key
        self.status = SequenceStatus.WAITING
        self.siblings: list[Sequence] = []  # choices that will be forked from this one
        self.num_told_tokens = 0  # when the runner was last told of its row; 0 before it knows the row

        self.row: int | None = None
        self.block_tables: tuple[list[int], ...] = ()  # block ids per KV group
        self.num_computed_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_pending_tokens = 0
        self.num_steps_in_flight = 0
        self.releasing = False  # gives its row and blocks back when its last step in flight retires

        self.root_name: bytes | None = None  # of its chain of block names; None without prefix caching
        self.block_names: list[bytes] = []
        self.num_committed_blocks = 0
        self.num_claimed_blocks = 0  # committed ones first; those between are announced as being computed
        self.waits_for: bytes | None = None  # block name that a running sequence is computing

        # positions below need no logits any more; one choice brings the logprobs of the prompt for all
        is_scored = request.params.prompt_logprobs is not None and choice_index == 0
        self.num_scored_tokens = 0 if is_scored else self.num_prompt_tokens - 1

        self.high_water = 0  # tokens ever scheduled: below it, computing is recomputing
        self.num_charged = 0  # of them, those that its client was charged for; a prompt is charged in advance
        self.num_preemptions = 0
        self.scheduled_s: float | None = None
        self.first_token_s: float | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, known or still pending in a step in flight."""
        return len(self.token_ids) + self.num_pending_tokens

    @property
    def position(self) -> int:
        """First token that no step has been asked to compute."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_pending_tokens - self.num_computed_tokens - self.num_scheduled_tokens

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Known tokens whose K/V may come from the prefix cache: all but the last, and none whose logits or hidden
        states are wanted, since only computing it gives them."""
        if self.request.params.pooling == "mean":
            return 0
        if self.num_scored_tokens < self.num_prompt_tokens - 1:
            return self.num_scored_tokens
        return len(self.token_ids) - 1

    def scored_in(self, start: int, end: int) -> range:
        """Positions in [start, end) whose logits are wanted for the logprob of the prompt token that follows."""
        return range(max(start, self.num_scored_tokens), min(end, self.num_prompt_tokens - 1))

    @property
    def wants_tokens(self) -> bool:
        """False when what is in flight may already be its last token."""
        num_output = len(self.token_ids) + self.num_pending_tokens - self.num_prompt_tokens
        return num_output < self.max_output_tokens or self.position < self.num_prompt_tokens

    @property
    def num_wanted_tokens(self) -> int:
        """num_uncomputed_tokens of a sequence that wants tokens, else 0. Asked of every sequence in every step."""
        num_tokens = len(self.token_ids) + self.num_pending_tokens
        position = self.num_computed_tokens + self.num_scheduled_tokens
        if num_tokens - self.num_prompt_tokens >= self.max_output_tokens and position >= self.num_prompt_tokens:
            return 0
        return num_tokens - position

    def schedule(self, num_tokens: int) -> bool:
        """`num_tokens` more are in flight. True if the step samples: nothing is left to compute after it, and an
        output is wanted at all."""
        self.num_scheduled_tokens += num_tokens
        position = self.num_computed_tokens + self.num_scheduled_tokens
        if position > self.high_water:
            self.high_water = position
        self.num_steps_in_flight += 1
        if self.max_output_tokens == 0 or len(self.token_ids) + self.num_pending_tokens != position:
            return False
        self.num_pending_tokens += 1
        return True

    def retire(self, end: int, sampled: bool) -> None:
        """The oldest step in flight is done: tokens up to `end` are computed."""
        self.num_steps_in_flight -= 1
        self.num_scheduled_tokens += self.num_computed_tokens - end
        self.num_computed_tokens = end
        self.num_pending_tokens -= sampled

    def append(self, token_id: int) -> FinishReason | None:
        """One more output token; the reason if it ends the sequence."""
        self.token_ids.append(token_id)
        num_output = len(self.token_ids) - self.num_prompt_tokens
        if token_id in self.request.stop_ids and num_output >= self.request.params.min_tokens:
            return "stop"
        return "length" if num_output >= self.max_output_tokens else None

    def forget_names(self) -> None:
        """For one that waits: it will be named anew."""
        self.root_name, self.waits_for = None, None
        self.block_names = []

    def forget_computed(self) -> None:
        """Its blocks are gone: whatever runs it next starts from what the prefix cache has kept."""
        self.num_computed_tokens = self.num_scheduled_tokens = 0
        self.num_committed_blocks = 0
        self.releasing = False

    def stats(self, finish_reason: FinishReason, now: float) -> RequestStats:
        return RequestStats(
            finish_reason=finish_reason,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.request.num_cached_tokens or 0,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            arrival_s=self.request.arrival_s,
            scheduled_s=self.scheduled_s,
            first_token_s=self.first_token_s,
            finished_s=now,
        )
