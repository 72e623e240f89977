"""Which client connections give way when there are as many as there may be: those that hold a place and have nothing
computed for it. Who only holds connections must not shut out the others."""

from __future__ import annotations

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
