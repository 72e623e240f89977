"""The sequences that compute one beam search: one per running hypothesis, moving together.

Knows their rows and blocks; leaves the search to `Search` and the order of things to the scheduler. Guarantees:
- a group holds `width` rows from its admission on, used or reserved, so that it never waits for a row half-way;
- hypotheses share the blocks of what they have in common, prefix caching or not; the first to write into a shared
  block copies it;
- a preempted group starts again from one sequence, and the others are forked from it at the last full block they
  share with it.
"""

from __future__ import annotations

from engine.beam import Continuation, Finished, Search
from engine.kv.manager import KVCacheManager
from engine.outputs import TokenLogprobs
from engine.rows import RowPool
from engine.sequence import Request, Sequence, SequenceStatus


class BeamGroup:
    """beams[i] computes search.running[i]. choices: the request's sequences, which get the results; those of them
    that have ended early are left out of `open_choices`."""

    def __init__(self, request: Request, manager: KVCacheManager, rows: RowPool) -> None:
        assert request.params.beam is not None
        self.request = request
        self.width = request.params.beam.width
        self.choices = request.sequences
        self.open_choices = list(request.sequences)
        self.search = Search(request.params, request.stop_ids, request.sequences[0].max_output_tokens)
        self.num_reserved = 0  # rows kept free for it
        self._manager = manager
        self._rows = rows
        self._heard: dict[Sequence, TokenLogprobs] = {}
        self._prompt = request.sequences[0].token_ids.copy()
        self.beams = [self._new_beam(())]

    def admitted(self, now: float) -> None:
        """The first sequence has a row: the rows of the others are kept free."""
        self.reserve()
        for choice in self.choices:
            if choice.scheduled_s is None:
                choice.scheduled_s = now

    def hear(self, beam: Sequence, candidates: TokenLogprobs) -> None:
        """A step has told the best next tokens of a hypothesis."""
        self._heard[beam] = candidates

    def advance(self) -> list[Continuation] | None:
        """What goes on, once every hypothesis was heard; None until then, empty when the search is over."""
        if len(self._heard) < len(self.beams):
            return None
        heard = [self._heard[beam] for beam in self.beams]
        self._heard.clear()
        return self.search.advance(heard)

    def results(self) -> list[tuple[Sequence, Finished | None]]:
        """The open choices, those first for which the search that is over has found something."""
        pairs = zip(self.choices, self.search.results(len(self.choices)), strict=False)
        found = {choice: each for choice, each in pairs if choice in self.open_choices}
        return [*found.items(), *((choice, None) for choice in self.open_choices if choice not in found)]

    def grow(self, continuations: list[Continuation], running: list[Sequence]) -> None:
        """The sequences take over what goes on: the best continuation of a hypothesis stays on its row, further ones
        fork from it, sequences without one end. running: the scheduler's list; the group's part of it changes."""
        old = self.beams
        place = min(running.index(beam) for beam in old)
        parents = {each.parent for each in continuations}
        for index, beam in enumerate(old):
            running.remove(beam)
            if index not in parents:
                self._leave(beam)
        stayed: set[int] = set()
        self.beams = []
        for each in continuations:
            beam = old[each.parent]
            if each.parent in stayed:
                beam = self._forked(beam)
            stayed.add(each.parent)
            self.beams.append(beam)
        for beam, each in zip(self.beams, continuations, strict=True):
            beam.token_ids.append(each.token_id)
            beam.max_output_tokens += 1
        running[place:place] = self.beams
        self.reserve()

    def fork_waiting(self, trunk: Sequence) -> list[Sequence]:
        """After a preemption: the trunk's tokens will be computed, the others start from what they share with it."""
        others, trunk.siblings = trunk.siblings, []
        for beam in others:
            shared = _common_prefix(trunk.token_ids, beam.token_ids)
            num_tokens = min(shared, len(beam.token_ids) - 1) // self._manager.block_size * self._manager.block_size
            self._rows.take(beam)
            self._manager.fork(trunk, beam, num_tokens)
            beam.num_computed_tokens = num_tokens
            beam.status = SequenceStatus.RUNNING
        self.reserve()
        return others

    def reset(self) -> Sequence:
        """All sequences leave their rows; new ones are made for the same hypotheses. Returns the trunk, whose siblings
        are the others."""
        for beam in self.beams:
            self._leave(beam)
        self._heard.clear()
        pairs = zip(self.search.running, self.beams, strict=True)
        self.beams = [self._new_beam(each.token_ids, beam) for each, beam in pairs]
        trunk, *others = self.beams
        trunk.siblings = others
        self.release_reserved()
        return trunk

    def disband(self) -> None:
        """The search ends, whatever the state of its sequences."""
        for beam in self.beams:
            self._leave(beam)
        self.beams = []
        self.release_reserved()

    def reserve(self) -> None:
        """Keep rows free for the hypotheses that may come."""
        wanted = self.width - sum(beam.row is not None for beam in self.beams)
        self._rows.num_reserved += wanted - self.num_reserved
        self.num_reserved = wanted

    def release_reserved(self) -> None:
        self._rows.num_reserved -= self.num_reserved
        self.num_reserved = 0

    def _new_beam(self, output: tuple[int, ...], before: Sequence | None = None) -> Sequence:
        beam = Sequence(self.request, 0, self._prompt.copy(), 0)
        beam.token_ids += output
        beam.max_output_tokens = len(output) + 1  # what comes after is known when all have been heard
        if before is not None:
            beam.high_water = beam.num_charged = before.high_water
        return beam

    def _forked(self, parent: Sequence) -> Sequence:
        """A sequence in the parent's state, on a row of its own."""
        child = self._new_beam(tuple(parent.token_ids[len(self._prompt) :]), parent)
        self._rows.take(child)
        self._manager.fork(parent, child)
        child.num_computed_tokens = parent.num_computed_tokens
        child.status = SequenceStatus.RUNNING
        return child

    def _leave(self, beam: Sequence) -> None:
        beam.status = SequenceStatus.FINISHED
        self._rows.leave(beam)


def _common_prefix(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
