"""What an operator wants to see of the engine at one moment: its blocks, its sequences. Painted when somebody asks.

Runs in the engine thread between two steps, so it is bounded: a map of at most MAX_CELLS cells, at most
MAX_BLOCKS_READ blocks read per picture, at most MAX_SEQUENCES of each queue told. Nobody asks, nothing is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from engine.kv.block_allocator import Block
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from engine.stats import Picture, SequenceView

MAX_CELLS = 4096
MAX_BLOCKS_READ = 8192  # about a millisecond; of larger pools a picture renews a half, a third...
MAX_SEQUENCES = 48
MOST_HELD = 7  # reference counts above it look alike
FULLEST = 15
IS_USED = bytes(code > 1 for code in range(256))


class Painter:
    """One engine's. Keeps the map between pictures, for pools that are read in turns."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        num_blocks = scheduler.manager.allocator.num_blocks
        self._blocks_per_cell = -(-num_blocks // MAX_CELLS)
        self._cells = bytearray(-(-num_blocks // self._blocks_per_cell))
        self._num_turns = -(-num_blocks // MAX_BLOCKS_READ)
        self._turn = 0

    def paint(self, now: float) -> Picture:
        """now: time.monotonic()."""
        queues = self._scheduler.queues
        self._renew()
        return Picture(
            cells=bytes(self._cells),
            blocks_per_cell=self._blocks_per_cell,
            running=_views(queues.running, now),
            waiting=_views(queues.waiting, now),
        )

    def _renew(self) -> None:
        blocks, size = self._scheduler.manager.allocator.blocks, self._blocks_per_cell
        if size == 1:
            self._cells[:] = bytes(_codes(blocks))
            return
        cells_per_turn = -(-len(self._cells) // self._num_turns)
        first = self._turn * cells_per_turn
        self._turn = (self._turn + 1) % self._num_turns
        codes = bytes(_codes(blocks[first * size : (first + cells_per_turn) * size]))
        used = codes.translate(IS_USED)
        for cell, start in enumerate(range(0, len(codes), size), start=first):
            code = max(codes[start : start + size])
            self._cells[cell] = code | FULLEST * used.count(1, start, start + size) // size << 4


def _codes(blocks: Iterable[Block]) -> list[int]:
    """Of a block: twice its reference count, plus one if its content has a name."""
    return [
        (block.ref_count if block.ref_count < MOST_HELD else MOST_HELD) * 2 + (block.name is not None)
        for block in blocks
    ]


def _views(sequences: Iterable[Sequence], now: float) -> tuple[SequenceView, ...]:
    return tuple([_view(sequence, now) for sequence in islice(sequences, MAX_SEQUENCES)])


def _view(sequence: Sequence, now: float) -> SequenceView:
    request = sequence.request
    return SequenceView(
        stream_id=request.stream_id,
        prompt_index=request.prompt_index,
        choice_index=sequence.choice_index,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_computed_tokens=sequence.num_computed_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        num_output_tokens=sequence.num_output_tokens,
        max_output_tokens=sequence.max_output_tokens,
        num_blocks=sum(map(len, sequence.block_tables)),
        num_preemptions=sequence.num_preemptions,
        age_s=now - request.arrival_s,
        adapter=request.adapter,
    )
