"""Which client connections give way when there are as many as there may be: those that hold a place and have nothing
computed for it. Who only holds connections must not shut out the others."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from typing import Generic, TypeVar

Holder = TypeVar("Holder")


class Place(IntEnum):
    """What a connection does; the lower gives way first."""

    IDLE = 0  # has no request
    SENDING = 1  # its request is not whole, or was refused and is still being sent
    WATCHING = 2  # reads what it can ask for again: the events of a kept response, the status page
    BUSY = 3  # its request is being answered: never gives way


class Places(Generic[Holder]):
    """The connections of one server, in each place the longest there first. All in O(1)."""

    def __init__(self) -> None:
        self._held: dict[Place, dict[Holder, None]] = {place: {} for place in Place if place is not Place.BUSY}
        self._at: dict[Holder, Place] = {}

    def put(self, holder: Holder, place: Place | None) -> None:
        """From now on it is there; None: it is gone. Staying where it was keeps its rank."""
        before = self._at.get(holder)
        if before is place:
            return
        if before is not None:
            del self._held[before][holder]
            del self._at[holder]
        if place is not None and place is not Place.BUSY:
            self._held[place][holder] = None
            self._at[holder] = place

    def first(self) -> Holder | None:
        """Who gives way next; None: nobody."""
        return next((holder for held in self._held.values() for holder in held), None)


class Crowd(Generic[Holder]):
    """Who has not been let in yet, by address, of each the longest there first. All in O(1) but walking over it."""

    def __init__(self) -> None:
        self._of: dict[bytes, dict[Holder, None]] = {}
        self._by_size: dict[int, dict[bytes, None]] = {}  # the addresses that have so many
        self._count = 0
        self._largest = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Holder]:
        """Over those who are there now."""
        return iter([holder for held in self._of.values() for holder in held])

    def add(self, address: bytes, holder: Holder) -> None:
        held = self._of.setdefault(address, {})
        held[holder] = None
        self._resize(address, len(held) - 1, len(held))

    def remove(self, address: bytes, holder: Holder) -> None:
        """Nothing happens if it is not there."""
        held = self._of.get(address, {})
        if holder not in held:
            return
        del held[holder]
        self._resize(address, len(held) + 1, len(held))
        if not held:
            del self._of[address]

    def first_of_largest(self) -> Holder | None:
        """Of the address that has the most (of several such, the one that has so many the longest) the first; it
        stays. None: nobody is there."""
        address = next(iter(self._by_size.get(self._largest, ())), None)
        return None if address is None else next(iter(self._of[address]))

    def next(self) -> Holder | None:
        """Takes one away, by turns of the addresses. None: nobody is there."""
        address = next(iter(self._of), None)
        if address is None:
            return None
        holder = next(iter(self._of[address]))
        self.remove(address, holder)
        if address in self._of:
            self._of[address] = self._of.pop(address)
        return holder

    def _resize(self, address: bytes, before: int, after: int) -> None:
        self._count += after - before
        if before:
            same = self._by_size[before]
            del same[address]
            if not same:
                del self._by_size[before]
        if after:
            self._by_size.setdefault(after, {})[address] = None
        if after > self._largest or self._largest not in self._by_size:
            self._largest = after  # one more or one fewer than it was: nobody stands between
