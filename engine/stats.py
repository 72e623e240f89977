"""Numbers that leave the engine thread: per step and per finished sequence. Times are seconds on the monotonic
clock (time.monotonic), counts are since the last delivery unless named `num_*_total`. What is made in every step is a
named tuple: a frozen dataclass takes a call per field, and costs the more when nothing of it is in the caches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class CacheStats(NamedTuple):
    """State of the block pool at the end of a step; `*_total` count since start."""

    num_blocks: int = 0
    num_used_blocks: int = 0  # ref_count >= 1
    num_cached_blocks: int = 0  # hashed, whether used or free
    num_shared_blocks: int = 0  # ref_count >= 2
    live_slots: int = 0  # distinct written slots in used blocks
    block_copies_total: int = 0  # copy-on-write and partial-block reuse
    copy_on_write_total: int = 0
    evictions_total: int = 0
    prefix_queries_total: int = 0  # prompt tokens looked up
    prefix_hits_total: int = 0  # prompt tokens found
    live_slot_steps_total: int = 0  # sum over steps of live_slots
    used_slot_steps_total: int = 0  # sum over steps of block_size * num_used_blocks
    min_utilization: float = 1.0  # smallest live_slots / (block_size * num_used_blocks) of any step


class StepStats(NamedTuple):
    """One engine step."""

    step_id: int
    num_running: int
    num_waiting: int
    num_scheduled_seqs: int = 0
    num_prompt_tokens: int = 0  # tokens computed that were prompt (or recomputed after preemption)
    num_decode_tokens: int = 0
    num_preemptions_total: int = 0
    num_recomputed_tokens_total: int = 0  # tokens computed a second time after preemption
    num_discarded_tokens_total: int = 0  # sampled past an abort or a stop
    schedule_s: float = 0.0
    execute_s: float = 0.0
    update_s: float = 0.0
    forward_s: float | None = None  # of execute_s: the model; None where the runner does not tell
    sampling_s: float | None = None  # of execute_s: choosing tokens
    handed_s: float | None = None  # time.monotonic() when the engine thread let go of it; None: there was no step
    cache: CacheStats = CacheStats()


@dataclass(frozen=True, slots=True)
class SequenceView:
    """How far one sequence is. age_s: since its request arrived; adapter: its name, empty for the model itself."""

    stream_id: int
    prompt_index: int
    choice_index: int
    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    max_output_tokens: int
    num_blocks: int
    num_preemptions: int
    age_s: float
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Picture:
    """The engine at one moment, for people to look at (engine/painter.py).

    cells: one byte for every `blocks_per_cell` blocks, in the order of their ids. Bit 0: the content has a name, so it
    can be found again; bits 1-3: reference count, 7 for any above; of several blocks the greatest of these. Bits 4-7:
    the share of them that is used, 0 to 15; 0 where a cell is one block. running, waiting: the first of each queue."""

    cells: bytes
    blocks_per_cell: int
    running: tuple[SequenceView, ...] = ()
    waiting: tuple[SequenceView, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One finished sequence. first_token_s is None if it ended before a token."""

    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    finished_s: float
