"""Who computes how many tokens in the next step, and what becomes of what the step sampled.

Knows queues, rows and the token budget; leaves blocks to the KV manager and time to the caller. There is no
prefill and no decode mode: a step gives every sequence some of the tokens it has and has not computed. Guarantees:
- every running sequence that lacks one token gets it in every step, unless memory is short;
- who is next (`Waiting` knows) and does not fit holds the others back, so none starves; only one that waits for a
  prefix another is computing lets others pass;
- the oldest running sequence always advances: under pressure the youngest gives its memory back first;
- rows and blocks of a sequence are reused only when the last step in flight that names it has retired;
- every sequence that was added ends exactly once: a finish_reason in an output, and one RequestStats.
"""

from __future__ import annotations

from engine.batch import RowOutput, ScheduledBatch, ScheduledRow, StepOutput
from engine.beam_groups import BeamGroups
from engine.config import SchedulerConfig
from engine.kv.manager import KVCacheManager, PrefixMatch
from engine.outputs import FinishReason
from engine.pipeline import Pipeline
from engine.queues import Queues
from engine.rows import RowPool
from engine.sequence import Request, Sequence, SequenceStatus
from engine.stats import StepStats
from engine.step import Changes, Collected, StepPlan

NO_ERROR = RowOutput()
TOO_FEW_FOUND = RowOutput(error="The beam search found fewer outputs than were asked for.")


class Scheduler:
    """max_model_len: tokens per sequence; the manager's pool must hold one such sequence, else ValueError."""

    def __init__(self, config: SchedulerConfig, manager: KVCacheManager, max_model_len: int) -> None:
        needed = -(-max_model_len // manager.block_size) * manager.num_groups
        if needed > manager.allocator.num_blocks:
            raise ValueError(
                f"a sequence of {max_model_len} tokens needs {needed} blocks, "
                f"the pool has {manager.allocator.num_blocks}"
            )
        self.manager = manager
        self._config = config
        self._max_model_len = max_model_len
        self._live: dict[int, dict[tuple[int, int], Sequence]] = {}  # stream -> (prompt, choice) -> not yet ended
        self._rows = RowPool(config.max_num_seqs, manager)
        self._in_flight = Pipeline(config.pipeline_depth or 1)
        self.queues = Queues()
        self._groups = BeamGroups(manager, self._rows, self.queues)
        self._num_preemptions = self._num_recomputed = self._num_discarded = 0

    # -- the queue

    @property
    def has_work(self) -> bool:
        return bool(self.queues.running or self.queues.waiting or self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not yet updated."""
        return len(self._in_flight)

    @property
    def pipeline_depth(self) -> int:
        """Steps that may be in flight."""
        return self._in_flight.depth

    def add(self, request: Request) -> None:
        """Queue a request. Raises ValueError if it can never be served; the door should have refused it."""
        primary, *siblings = request.sequences
        room = self._max_model_len - primary.num_prompt_tokens
        wanted = request.params.max_tokens
        if not primary.token_ids or room < (0 if wanted == 0 else 1):
            raise ValueError(f"a prompt of {primary.num_prompt_tokens} tokens cannot be served")
        for sequence in request.sequences:
            sequence.max_output_tokens = room if wanted is None else min(room, wanted)
        beams = self._groups.add(request) if request.params.beam is not None else []
        self.queues.waiting.enter(request, self.queues.running)
        if beams:
            self.queues.waiting.add(beams[0])
        else:
            self.queues.add(primary, siblings)
        live = self._live.setdefault(request.stream_id, {})
        live.update({(request.prompt_index, s.choice_index): s for s in request.sequences})

    def abort(
        self,
        stream_id: int,
        prompt_index: int | None = None,
        choice_index: int | None = None,
        *,
        now: float,
        reason: FinishReason = "abort",
    ) -> Changes:
        """End a stream, one of its prompts, or one sequence; unknown or ended ones are ignored.

        reason: what its last output and its statistics say ("stop" for a stop string the assembler found)."""
        collected = Collected(now)
        for (prompt, choice), sequence in reversed(list(self._live.get(stream_id, {}).items())):
            if prompt_index in (None, prompt) and choice_index in (None, choice):
                self._end(sequence, reason, collected)
        return collected.freeze()

    def preempt_all(self) -> None:
        """Put every running sequence back to waiting, as pressure would. For tests and for giving memory back."""
        while self.queues.running:
            self._preempt(self.queues.running[-1])

    def reset_prefix_cache(self) -> None:
        """Who is admitted from now on finds nothing of what was computed before."""
        self.manager.reset_prefix_cache()
        for sequence in self.queues.waiting:
            if not sequence.releasing:  # else its blocks still have their names
                sequence.forget_names()

    # -- schedule

    def schedule(self, now: float) -> ScheduledBatch | None:
        """The next step, or None if nothing can be scheduled before a step in flight is updated."""
        if len(self._in_flight) >= self.pipeline_depth:
            return None
        step = StepPlan(now, self._config.max_num_batched_tokens)
        if self._schedule_running(step):
            self._schedule_waiting(step)
        self.queues.waiting.put_first(step.overflow)
        if not step.rows:
            assert self._in_flight or not self.has_work, "work, but nothing to do and nothing to wait for"
            return None
        return self._dispatch(step)

    def _dispatch(self, step: StepPlan) -> ScheduledBatch:
        self.manager.record_step()
        new_blocks, block_copies = self.manager.take_deltas()
        self._num_recomputed += step.num_recomputed_tokens
        self._in_flight.enter(step)
        return ScheduledBatch(
            step_id=step.step_id,
            freed_rows=self._rows.take_freed(),
            new_rows=tuple(step.new_rows),
            new_tokens=tuple(step.new_tokens),
            new_blocks=new_blocks,
            block_copies=block_copies,
            rows=tuple(step.rows),
        )

    def _schedule_running(self, step: StepPlan) -> bool:
        """Oldest first; budget is kept for those behind that need one token. False if one of them stands still
        for want of memory: a newcomer would only be preempted for it."""
        served = True
        wanting = [(s, num_tokens) for s in self.queues.running if (num_tokens := s.num_wanted_tokens) > 0]
        step.num_decoding = [num_tokens for _, num_tokens in wanting].count(1)
        if step.num_decoding:  # a burst of prompts must not make those who already stream wait for all of it
            step.budget = min(step.budget, step.num_decoding + self._config.max_chunk_tokens)
        unserved = step.num_decoding
        for sequence, num_tokens in wanting:
            if sequence.status is not SequenceStatus.RUNNING:  # it had to give way
                continue
            if num_tokens == 1:
                unserved -= 1
            if num_tokens > step.budget - unserved:
                num_tokens = step.budget - unserved
            if num_tokens <= 0:
                continue
            if self._make_room(sequence, num_tokens):
                self._add(step, sequence, num_tokens)
            else:
                served = False
        self.queues.running += step.take_forked()
        return served

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate slots for the tokens. Younger sequences give way; the youngest itself stands still, as the older
        ones go on and will free memory."""
        while not self.manager.allocate_slots(sequence, num_tokens):
            victim = self.queues.running[-1]
            if (
                self._groups.move_together(victim, sequence) or self._rows.num_releasing
            ):  # blocks come back when a step retires
                return False
            self._preempt(victim)
        return True

    def _schedule_waiting(self, step: StepPlan) -> None:
        manager, waiting = self.manager, self.queues.waiting
        if not waiting or not self._rows.has_free or step.budget <= 0:
            return
        waiting.settle(self.queues.running)
        while waiting and self._rows.has_free and step.budget > 0:
            sequence = waiting.first
            if sequence.releasing or self._rows.num_free < self._groups.num_rows_wanted(sequence):
                break
            match = None if manager.is_claimed(sequence.waits_for) else manager.match_prefix(sequence)
            if match is None or manager.is_claimed(match.next_name):
                if match is not None:
                    sequence.waits_for = match.next_name
                waiting.pass_over()
                continue
            needed = manager.num_blocks_to_admit(sequence, match)
            # one block of headroom per running sequence, so that the newcomer is not preempted at once
            if needed + len(self.queues.running) > manager.num_free_blocks:
                break
            waiting.take()
            self._admit(step, sequence, match)
            self.queues.running += step.take_forked()
        waiting.restore()

    def _admit(self, step: StepPlan, sequence: Sequence, match: PrefixMatch) -> None:
        sequence.waits_for = None
        self._start(step, sequence)
        if (group := self._groups.of(sequence)) is not None:
            group.admitted(step.now)
        self.queues.running.append(sequence)
        num_cached = self.manager.begin(sequence, match)
        self.queues.waiting.admitted(sequence)
        request = sequence.request
        if request.num_cached_tokens is None:
            request.num_cached_tokens = num_cached
            if self.manager.enable_prefix_caching:
                self.manager.count_prefix_query(sequence.num_prompt_tokens, num_cached)
        num_tokens = min(sequence.num_uncomputed_tokens, step.budget)
        fits = self.manager.allocate_slots(sequence, num_tokens, announce=False)
        assert fits, "admission counted the blocks"
        step.tell_new_row(sequence)
        self._add(step, sequence, num_tokens)

    def _add(self, step: StepPlan, sequence: Sequence, num_tokens: int) -> None:
        index = len(step.rows)
        group = self._groups.of(sequence)
        if group is not None:
            step.tell_tokens(sequence)
        if step.add(sequence, num_tokens) and sequence.siblings:
            if group is None:
                self._fork_siblings(step, sequence, index)
            else:
                self._groups.fork(group, sequence)

    def _fork_siblings(self, step: StepPlan, primary: Sequence, index: int) -> None:
        """The prompt will be computed: its other choices sample from the same logits, as far as rows are free."""
        self.queues.num_unforked -= len(primary.siblings)
        for sibling in primary.siblings:
            if not self._rows.has_free:
                step.overflow.append(sibling)
                continue
            self._start(step, sibling)
            self.manager.fork(primary, sibling)
            sibling.num_computed_tokens = primary.num_computed_tokens
            sibling.num_charged = sibling.num_prompt_tokens
            step.tell_new_row(sibling)
            step.add(sibling, sibling.num_prompt_tokens - sibling.num_computed_tokens, logits_from=index)
            step.forked.append(sibling)
        primary.siblings = []

    def _start(self, step: StepPlan, sequence: Sequence) -> None:
        self._rows.take(sequence)
        sequence.status = SequenceStatus.RUNNING
        if sequence.scheduled_s is None:
            sequence.scheduled_s = step.now
            step.started.append((sequence.request.stream_id, step.now))

    # -- update

    def update(self, batch: ScheduledBatch, output: StepOutput, now: float) -> Changes:
        """Take in what the oldest step in flight computed. Raises RuntimeError if the answer is not of that step."""
        step = self._in_flight.retire(batch, output)
        collected = Collected(now, started=step.started)
        for sequence, scheduled, row in zip(step.sequences, step.rows, output.rows, strict=True):
            self._take(sequence, scheduled, row, collected)
        return collected.freeze()

    def fail_step(self, batch: ScheduledBatch, message: str, now: float) -> Changes:
        """A step in flight, the oldest or a later one, came to nothing: its sequences end with "error", the others
        live on."""
        step = self._in_flight.drop(batch)
        collected = Collected(now)
        for sequence, scheduled in zip(step.sequences, step.rows, strict=True):
            self._take(sequence, scheduled, RowOutput(error=message), collected)
        return collected.freeze()

    def _take(self, sequence: Sequence, scheduled: ScheduledRow, row: RowOutput, collected: Collected) -> None:
        sequence.retire(scheduled.end, scheduled.logits_from is not None)
        if sequence.status is SequenceStatus.FINISHED:
            self._num_discarded += len(row.token_ids)
        elif row.error is not None:
            group = self._groups.of(sequence)
            for each in (sequence,) if group is None else tuple(group.open_choices):
                self._end(each, "error", collected, row)
        else:
            self.manager.commit(sequence)
            self._take_computed(sequence, scheduled, row, collected)
        if sequence.releasing:
            self._rows.retire(sequence)

    def _take_computed(
        self, sequence: Sequence, scheduled: ScheduledRow, row: RowOutput, collected: Collected
    ) -> None:
        if row.prompt_logprobs is not None:
            sequence.num_scored_tokens = min(scheduled.end, sequence.num_prompt_tokens - 1)
        if scheduled.logits_from is not None:
            self._append(sequence, row, collected)
            return
        if row.prompt_logprobs is not None:
            collected.tell(sequence, prompt_logprobs=row.prompt_logprobs)
        if sequence.max_output_tokens == 0 and scheduled.end == sequence.num_prompt_tokens:
            if row.embedding is not None:
                collected.tell(sequence, embedding=row.embedding)
            for each in (*sequence.siblings, sequence):  # no output was asked for: the prompt was all
                self._end(each, "length", collected)

    def _append(self, sequence: Sequence, row: RowOutput, collected: Collected) -> None:
        group = self._groups.of(sequence)
        if group is not None:
            for choice, found in self._groups.hear(group, sequence, row, collected):
                if found is None:
                    self._end(choice, "error", collected, TOO_FEW_FOUND)
                else:
                    collected.tell_found(choice, found)
                    self._close(choice, found.reason, collected)
            return
        if len(row.token_ids) != 1:
            raise RuntimeError(f"row {sequence.row} was to sample one token, got {len(row.token_ids)}")
        token_id = row.token_ids[0]
        if sequence.first_token_s is None:
            sequence.first_token_s = collected.now
        reason = sequence.append(token_id)
        if row.ends:
            reason = "stop"
        stop_token_id = token_id if reason == "stop" and token_id in sequence.request.stop_ids else None
        collected.tell_drawn(sequence, row, reason, stop_token_id)
        if reason is not None:
            self._close(sequence, reason, collected)

    # -- the end of a sequence, and of its stay

    def _end(self, sequence: Sequence, reason: FinishReason, collected: Collected, why: RowOutput = NO_ERROR) -> None:
        """End it without another token. Choices not yet forked share its error, or go on without it."""
        collected.tell(sequence, finish_reason=reason, error=why.error, error_param=why.error_param)
        if reason == "error":
            for sibling in tuple(sequence.siblings):
                self._end(sibling, reason, collected, why)
        self._close(sequence, reason, collected)

    def _close(self, sequence: Sequence, reason: FinishReason, collected: Collected) -> None:
        collected.finished.append(sequence.stats(reason, collected.now))
        stream_id = sequence.request.stream_id
        live = self._live[stream_id]
        del live[sequence.request.prompt_index, sequence.choice_index]
        if not live:
            del self._live[stream_id]
        group = self._groups.of(sequence)
        if group is None:
            self.queues.leave(sequence)
        else:
            self._groups.leave(group, sequence)
        self.queues.waiting.leave(sequence)
        sequence.status = SequenceStatus.FINISHED
        self._rows.leave(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of waiting. Its tokens stay, its blocks stay cached until others need them."""
        self._num_preemptions += 1
        group = self._groups.of(sequence)
        if group is not None:
            self._groups.preempt(group)
            return
        self.queues.put_back(sequence)
        sequence.num_preemptions += 1
        self._rows.leave(sequence)

    # -- numbers

    def step_stats(self) -> StepStats:
        """Gauges of this moment, and what the step updated last computed; told once, then its counts are zero. The
        caller adds how long it took."""
        step_id, step = self._in_flight.take_retired()
        return StepStats(
            step_id=step_id,
            num_running=len(self.queues.running),
            num_waiting=self.queues.num_waiting,
            num_scheduled_seqs=len(step.rows),
            num_prompt_tokens=step.num_prompt_tokens,
            num_decode_tokens=step.num_decode_tokens,
            num_preemptions_total=self._num_preemptions,
            num_recomputed_tokens_total=self._num_recomputed,
            num_discarded_tokens_total=self._num_discarded,
            cache=self.manager.stats(),
        )

    def check(self) -> None:
        """Raises AssertionError unless rows, blocks and queues add up. For tests."""
        named = {id(s): s for step in self._in_flight for s in step.sequences}
        choices = [s for stream in self._live.values() for s in stream.values()]
        beams = self._groups.check(s.request for s in choices)
        live = {id(s): s for s in [*beams, *(s for s in choices if s.request.params.beam is None)]}
        holders = [s for s in {**named, **live}.values() if s.row is not None]
        self._rows.check(holders)
        self.queues.check(live.values())
        if not self.has_work:
            assert not live
            assert self.manager.num_free_blocks == self.manager.allocator.num_blocks, "blocks leaked"
