"""How KV memory was kept before paging: one contiguous region per sequence. And what `kv_waste` asks of any allocator.

Sizes are slots (one token's K and V in all layers).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class KvRequest:
    """token_ids: the prompt and every token that will be generated; the last of them is never written."""

    key: int
    token_ids: tuple[int, ...]
    num_prompt_tokens: int

    @property
    def final_slots(self) -> int:
        return len(self.token_ids) - 1


@dataclass(frozen=True, slots=True)
class Usage:
    """Where the slots of the pool are. live: hold a token. reserved: allocated, and will hold one. internal:
    allocated, and never will. free: not allocated. They add up to the capacity.
    logical: tokens of all sequences, a shared one counted for each."""

    live: int
    reserved: int
    internal: int
    free: int
    logical: int


class KvAllocator(Protocol):
    name: str
    capacity: int

    def admit(self, request: KvRequest, num_tokens: int) -> bool:
        """Memory for the first num_tokens tokens, written at once. False, and nothing changed, without room."""

    def grow(self, request: KvRequest) -> bool:
        """Memory for one more token, written. False, and nothing changed, without room."""

    def release(self, request: KvRequest) -> None: ...

    def usage(self) -> Usage: ...

    def slots_to_admit(self, request: KvRequest, num_tokens: int) -> int:
        """Free slots that admitting would take if they lay well."""


class Holes:
    """Free ranges of [0, capacity), first fit."""

    def __init__(self, capacity: int) -> None:
        self._holes: list[tuple[int, int]] = [(0, capacity)]  # (start, end), ascending, never adjacent

    @property
    def free(self) -> int:
        return sum(end - start for start, end in self._holes)

    def take(self, size: int) -> int | None:
        """Start of a range that was free, or None."""
        for index, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._replace(index, start + size, end)
                return start
        return None

    def take_at(self, start: int, size: int) -> bool:
        """The range that begins exactly at `start`, if it is free."""
        for index, (first, end) in enumerate(self._holes):
            if first == start and end - first >= size:
                self._replace(index, first + size, end)
                return True
        return False

    def give(self, start: int, size: int) -> None:
        insort(self._holes, (start, start + size))
        merged: list[tuple[int, int]] = []
        for hole in self._holes:
            if merged and merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], hole[1])
            else:
                merged.append(hole)
        self._holes = merged

    def _replace(self, index: int, start: int, end: int) -> None:
        self._holes[index : index + 1] = [(start, end)] if start < end else []


@dataclass(slots=True)
class _Region:
    request: KvRequest
    start: int
    size: int
    live: int


class Contiguous:
    """max_len given: every sequence gets a region of that size for life. None: the next power of two that holds its
    tokens; a full region doubles, in place if what lies behind it is free, else by moving (old and new at once)."""

    def __init__(self, capacity: int, max_len: int | None) -> None:
        self.name = "contiguous, reserved to the maximum" if max_len else "contiguous, doubling"
        self.capacity = capacity
        self.num_moves = 0
        self._max_len = max_len
        self._holes = Holes(capacity)
        self._regions: dict[int, _Region] = {}

    def slots_to_admit(self, request: KvRequest, num_tokens: int) -> int:
        return self._max_len or power_of_two(num_tokens)

    def admit(self, request: KvRequest, num_tokens: int) -> bool:
        size = self.slots_to_admit(request, num_tokens)
        start = self._holes.take(size)
        if start is None:
            return False
        self._regions[request.key] = _Region(request, start, size, num_tokens)
        return True

    def grow(self, request: KvRequest) -> bool:
        region = self._regions[request.key]
        if region.live == region.size and not self._double(region):
            return False
        region.live += 1
        return True

    def _double(self, region: _Region) -> bool:
        if self._holes.take_at(region.start + region.size, region.size):
            region.size *= 2
            return True
        start = self._holes.take(2 * region.size)
        if start is None:
            return False
        self._holes.give(region.start, region.size)
        region.start, region.size = start, 2 * region.size
        self.num_moves += 1
        return True

    def release(self, request: KvRequest) -> None:
        region = self._regions.pop(request.key)
        self._holes.give(region.start, region.size)

    def usage(self) -> Usage:
        regions = self._regions.values()
        live = sum(region.live for region in regions)
        reserved, internal = tails([(region.size, region.live, region.request.final_slots) for region in regions])
        return Usage(live, reserved, internal, self._holes.free, live)


def tails(regions: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """(reserved, internal) of (size, live, final) triples: what of the rest will be written one day, and what not."""
    reserved = sum(min(size, final) - live for size, live, final in regions)
    return reserved, sum(size - min(size, final) for size, _, final in regions)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
