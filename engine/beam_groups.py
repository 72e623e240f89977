"""All beam searches of a scheduler, found by their sequences.

Knows which sequences move together, and moves them through the queues; decides nothing about when they do.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.batch import RowOutput
from engine.beam import Finished, num_blocks_needed
from engine.beam_group import BeamGroup
from engine.kv.manager import KVCacheManager
from engine.queues import Queues
from engine.rows import RowPool
from engine.sequence import Request, Sequence, SequenceStatus
from engine.step import Collected


class BeamGroups:
    def __init__(self, manager: KVCacheManager, rows: RowPool, queues: Queues) -> None:
        self._manager = manager
        self._rows = rows
        self._queues = queues
        self._groups: dict[Request, BeamGroup] = {}

    def of(self, sequence: Sequence) -> BeamGroup | None:
        """The search that the sequence computes, or whose result it gets."""
        return self._groups.get(sequence.request) if self._groups else None

    def move_together(self, one: Sequence, other: Sequence) -> bool:
        return one is other or (one.request is other.request and self.of(one) is not None)

    def num_rows_wanted(self, sequence: Sequence) -> int:
        """Rows that must be free to admit the sequence."""
        group = self.of(sequence)
        return 1 if group is None else group.width

    def add(self, request: Request) -> list[Sequence]:
        """The sequence that shall wait for the search. Raises ValueError for a search that may need more rows or
        blocks than there are."""
        choice, beam, manager = request.sequences[0], request.params.beam, self._manager
        assert beam is not None
        length = choice.num_prompt_tokens, choice.max_output_tokens
        needed = num_blocks_needed(beam, *length, manager.block_size) * manager.num_groups
        if beam.width > self._rows.num_rows or needed > manager.allocator.num_blocks:
            raise ValueError(f"a beam search of {beam.width} hypotheses and {needed} blocks cannot be served")
        group = self._groups[request] = BeamGroup(request, manager, self._rows)
        return group.beams

    def fork(self, group: BeamGroup, trunk: Sequence) -> None:
        """The others stand beside the trunk, for they are as old as it is, and compute from the next step on."""
        running = self._queues.running
        self._queues.num_unforked -= len(trunk.siblings)
        place = running.index(trunk) + 1
        running[place:place] = group.fork_waiting(trunk)

    def hear(
        self, group: BeamGroup, beam: Sequence, row: RowOutput, collected: Collected
    ) -> list[tuple[Sequence, Finished | None]]:
        """The candidates of one hypothesis are there; with those of the last one the search takes a step. When it is
        over, the choices that end, with what was found for them: None where a model bans nearly all tokens."""
        if row.top_logprobs is None or len(row.top_logprobs) != 1:
            raise RuntimeError(f"row {beam.row} was to tell candidates")
        group.hear(beam, row.top_logprobs[0])
        going = group.advance()
        if going is None:
            return []
        for choice in group.open_choices:
            if choice.first_token_s is None:
                choice.first_token_s = collected.now
                collected.tell(choice)  # it is no longer waiting; the tokens come at the end
        if not going:
            return group.results()
        group.grow(going, self._queues.running)
        return []

    def leave(self, group: BeamGroup, choice: Sequence) -> None:
        """A choice ends; with the last one the search does, and its sequences give back what they hold."""
        group.open_choices.remove(choice)
        if not group.open_choices:
            self._take_out(group)
            group.disband()
            del self._groups[group.request]

    def preempt(self, group: BeamGroup) -> None:
        """All its sequences back to the front of waiting, as one."""
        self._take_out(group)
        trunk = group.reset()
        self._queues.num_unforked += len(trunk.siblings)
        self._queues.waiting.put_first([trunk])
        for choice in group.choices:
            choice.num_preemptions += 1

    def check(self, requests: Iterable[Request]) -> list[Sequence]:
        """The sequences of all searches. Raises AssertionError unless the searches are those of `requests`, and rows
        are promised as they should be. For tests."""
        groups = self._groups.values()
        assert set(self._groups) == {request for request in requests if request.params.beam is not None}
        for group in groups:
            num_rows = sum(beam.row is not None for beam in group.beams)
            assert group.num_reserved == (group.width - num_rows if num_rows else 0)
        assert self._rows.num_reserved == sum(group.num_reserved for group in groups)
        return [beam for group in groups for beam in group.beams]

    def _take_out(self, group: BeamGroup) -> None:
        """Its sequences out of running and waiting."""
        queues = self._queues
        for beam in group.beams:
            queues.waiting.charge(beam)
            queues.num_unforked -= len(beam.siblings)
            beam.siblings = []
            if beam.status is SequenceStatus.RUNNING:
                queues.running.remove(beam)
            else:
                queues.waiting.remove(beam)
