"""A runner without a model: deterministic tokens, and a paged memory that knows what every slot must hold.

The "K/V" of token i is a hash of tokens 0..i, as a real key depends on everything before it. Each launch writes
through the block tables exactly as the runner would, then reads all slots the attention would read and compares.
A wrong block, a missing copy, a late free or a wrong position therefore fails the test at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from engine.batch import NewRow, RowOutput, ScheduledBatch, StepOutput
from engine.beam import Search, num_candidates
from engine.outputs import PromptLogprobs, TokenLogprobs
from engine.sampling_params import SamplingParams

VOCABULARY = 50
EOS = 7


def next_token(token_ids: Sequence[int], seed_key: int, eos_token_ids: Sequence[int], masked: bool) -> int:
    """A token that depends on all tokens before it and the sequence's key; end tokens avoided while masked."""
    digest = blake2b(b",".join(b"%d" % t for t in (seed_key, *token_ids)), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % VOCABULARY
    while masked and token in eos_token_ids:
        token = (token + 1) % VOCABULARY
    return token


def candidates(token_ids: Sequence[int], count: int) -> TokenLogprobs:
    """The `count` best next tokens of a distribution that depends on all tokens before."""
    weights, before = [], blake2b(b",".join(b"%d" % t for t in token_ids), digest_size=4)
    for token in range(VOCABULARY):
        digest = before.copy()
        digest.update(b";%d" % token)
        weights.append(-1.0 - int.from_bytes(digest.digest(), "little") / 2**30)
    best = sorted(range(VOCABULARY), key=lambda token: -weights[token])[:count]
    return TokenLogprobs(tuple(best), tuple(weights[token] for token in best))


def solo_search(
    prompt: Sequence[int], params: SamplingParams, max_model_len: int, eos: Sequence[int] = ()
) -> list[tuple[list[int], str]]:
    """What a beam search must find whatever happens around it, choice by choice."""
    eos = () if params.ignore_eos else eos
    room = max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    search = Search(params, frozenset((*eos, *params.stop_token_ids)), limit)
    count = num_candidates(params, eos)
    while search.advance([candidates([*prompt, *each.token_ids], count) for each in search.running]):
        pass
    return [(list(each.hypothesis.token_ids), each.reason) for each in search.results(params.n)]


def solo(
    prompt: Sequence[int], params: SamplingParams, key: int, max_model_len: int, eos: Sequence[int] = ()
) -> tuple[list[int], str]:
    """What a sequence must produce whatever happens around it: its output tokens and finish reason."""
    tokens = list(prompt)
    eos = () if params.ignore_eos else eos
    room = max_model_len - len(prompt)
    limit = room if params.max_tokens is None else min(room, params.max_tokens)
    if limit == 0:
        return [], "length"
    while True:
        num_output = len(tokens) - len(prompt)
        tokens.append(next_token(tokens, key, eos, num_output < params.min_tokens))
        stops = tokens[-1] in eos or tokens[-1] in params.stop_token_ids
        if stops and num_output + 1 >= params.min_tokens:
            return tokens[len(prompt) :], "stop"
        if num_output + 1 >= limit:
            return tokens[len(prompt) :], "length"


@dataclass
class Row:
    new: NewRow
    token_ids: list[int]
    prefix_hashes: list[int]
    block_tables: list[list[int]]


@dataclass(frozen=True)
class FakeHandle:
    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


@dataclass
class FakeRunner:
    """fails(batch, index): True makes that row answer with an error."""

    block_size: int
    fails: Callable[[ScheduledBatch, int], bool] = lambda batch, index: False
    rows: dict[int, Row] = field(default_factory=dict)
    memory: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, slot) -> hash of the tokens so far
    num_computed_tokens: int = 0
    num_copies: int = 0
    lost_a_step: bool = False  # a batch that failed before it came here took its freed_rows and new_rows along
    max_tokens_in_step: int = 0

    def launch(self, batch: ScheduledBatch) -> FakeHandle:
        self._apply_rows(batch)
        self._apply_copies(batch)
        assert batch.num_tokens > 0
        assert len({r.row for r in batch.rows}) == len(batch.rows), "a row is scheduled once"
        self._write(batch)
        for scheduled in batch.rows:
            self._verify(self.rows[scheduled.row], scheduled.num_computed + scheduled.num_scheduled)
        self.num_computed_tokens += batch.num_tokens
        self.max_tokens_in_step = max(self.max_tokens_in_step, batch.num_tokens)
        outputs = tuple(self._sample(batch, index) for index in range(len(batch.rows)))
        return FakeHandle(StepOutput(batch.step_id, outputs))

    def _apply_rows(self, batch: ScheduledBatch) -> None:
        for row in batch.freed_rows:
            assert row in self.rows or self.lost_a_step
            self.rows.pop(row, None)
        for new in batch.new_rows:
            assert new.row not in self.rows or self.lost_a_step, "a row is freed before it is given away"
            self.rows[new.row] = Row(new, list(new.token_ids), [], [list(t) for t in new.block_tables])
        for tokens in batch.new_tokens:
            row = self.rows[tokens.row]
            assert row.new.params.beam is not None, "other rows sample for themselves"
            assert tokens.start == len(row.token_ids), "only what the row lacks"
            row.token_ids += tokens.token_ids
        assert set(self.rows) >= {r.row for r in batch.rows}
        for blocks in batch.new_blocks:
            table = self.rows[blocks.row].block_tables[blocks.group]
            assert blocks.start <= len(table)
            table[blocks.start : blocks.start + len(blocks.block_ids)] = blocks.block_ids

    def _apply_copies(self, batch: ScheduledBatch) -> None:
        sources = {source for source, _ in batch.block_copies}
        destinations = [destination for _, destination in batch.block_copies]
        assert len(set(destinations)) == len(destinations), "a destination is written once"
        assert not sources & set(destinations), "copies of one step can run in any order"
        for source, destination in batch.block_copies:
            self._clear(destination)
            for slot in range(self.block_size):
                if (source, slot) in self.memory:
                    self.memory[destination, slot] = self.memory[source, slot]
        self.num_copies += len(batch.block_copies)

    def _clear(self, block: int) -> None:
        for slot in range(self.block_size):
            self.memory.pop((block, slot), None)

    def _hash(self, row: Row, position: int) -> int:
        for index in range(len(row.prefix_hashes), position + 1):
            before = row.prefix_hashes[index - 1] if index else 0
            row.prefix_hashes.append(hash((before, row.token_ids[index])))
        return row.prefix_hashes[position]

    def _write(self, batch: ScheduledBatch) -> None:
        written: set[tuple[int, int]] = set()
        for scheduled in batch.rows:
            row = self.rows[scheduled.row]
            end = scheduled.num_computed + scheduled.num_scheduled
            assert end <= len(row.token_ids), "only tokens that exist are computed"
            for table in row.block_tables:
                assert len(set(table)) == len(table)
                for position in range(scheduled.num_computed, end):
                    index, slot = divmod(position, self.block_size)
                    place = table[index], slot
                    assert place not in written, "two sequences write one slot"
                    written.add(place)
                    self.memory[place] = self._hash(row, position)

    def _verify(self, row: Row, end: int) -> None:
        for table in row.block_tables:
            for position in range(end):
                index, slot = divmod(position, self.block_size)
                held = self.memory.get((table[index], slot))
                assert held == self._hash(row, position), f"row {row.new.row}: wrong K/V at position {position}"

    def _sample(self, batch: ScheduledBatch, index: int) -> RowOutput:
        scheduled = batch.rows[index]
        failed = RowOutput(error="non-finite logits") if self.fails(batch, index) else None
        scores = self._score(batch, index)
        if scheduled.logits_from is None:
            return failed or RowOutput(prompt_logprobs=scores)
        row, origin = self.rows[scheduled.row], batch.rows[scheduled.logits_from]
        end = scheduled.num_computed + scheduled.num_scheduled
        assert end == origin.num_computed + origin.num_scheduled == len(row.token_ids), "sampled at the right place"
        assert row.token_ids == self.rows[origin.row].token_ids[:end], "logits of the same tokens"
        if row.new.params.beam is not None:
            best = candidates(row.token_ids, num_candidates(row.new.params, row.new.eos_token_ids))
            return failed or RowOutput(top_logprobs=(best,))
        masked = end - row.new.num_prompt_tokens < row.new.params.min_tokens
        token = next_token(row.token_ids, row.new.seed_key, row.new.eos_token_ids, masked)
        row.token_ids.append(token)  # also after a failure: a step behind this one may already compute it
        return failed or RowOutput((token,), (-1.0,), prompt_logprobs=scores)

    def _score(self, batch: ScheduledBatch, index: int) -> PromptLogprobs | None:
        """The "logprob" of a prompt token is its position with a minus sign, its rank the token itself."""
        scheduled = batch.rows[index]
        if not scheduled.scored:
            return None
        row, scored = self.rows[scheduled.row], scheduled.scored
        assert row.new.params.prompt_logprobs is not None
        assert scheduled.num_computed <= scored.start
        assert scored.stop <= scheduled.num_computed + scheduled.num_scheduled
        assert scored.stop < row.new.num_prompt_tokens
        tokens = [row.token_ids[position + 1] for position in scored]
        return PromptLogprobs(0, array("f", [-p - 1.0 for p in scored]), array("i", tokens), array("i"), array("f"))
