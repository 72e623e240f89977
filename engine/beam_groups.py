"""All beam searches of a scheduler, found by their sequences.

Knows which sequences move together; decides nothing about when they do.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.beam import num_blocks_needed
from engine.beam_group import BeamGroup
from engine.kv.manager import KVCacheManager
from engine.rows import RowPool
from engine.sequence import Request, Sequence


class BeamGroups:
    def __init__(self, manager: KVCacheManager, rows: RowPool) -> None:
        self._manager = manager
        self._rows = rows
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

    def add(self, request: Request) -> BeamGroup:
        """Raises ValueError for a search that may need more rows or blocks than there are."""
        choice, beam, manager = request.sequences[0], request.params.beam, self._manager
        assert beam is not None
        length = choice.num_prompt_tokens, choice.max_output_tokens
        needed = num_blocks_needed(beam, *length, manager.block_size) * manager.num_groups
        if beam.width > self._rows.num_rows or needed > manager.allocator.num_blocks:
            raise ValueError(f"a beam search of {beam.width} hypotheses and {needed} blocks cannot be served")
        group = self._groups[request] = BeamGroup(request, manager, self._rows)
        return group

    def remove(self, group: BeamGroup) -> None:
        """Its search is over: its sequences give back what they hold."""
        group.disband()
        del self._groups[group.request]

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
