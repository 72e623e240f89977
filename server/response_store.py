"""Responses that clients may ask for later, or continue from: in memory, bounded by count and by bytes. Where there is
no more room, the owner that holds the most gives first, what it has not used for the longest time: nobody's many
responses push out another's few.

Everything belongs to an owner, the account of the API key that it was made with, and is there for no other. Items are
found by ids that we made: nobody can guess those. An id that a client chose means something in its own conversation
only, since two clients of one key may choose the same.

What a response added to its conversation is kept once, however many later responses build on it: a conversation of
a hundred turns costs its text, not a hundred times its text. Everything is kept as JSON, so that bytes are what they
seem, and what a request wants back is measured before it is read. Responses that still run (`response_runs.py`) take
their room from the same bytes. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from server.event_log import EventLog

Item = dict[str, Any]
ENTRY_BYTES = 1024  # what an entry costs beside its text, roughly
TURN_BYTES = 512  # and a turn
ITEM_BYTES = 512  # what an item costs beside its text: objects, and that it is found by its id


class KeptItem(NamedTuple):
    """data: JSON. is_ours: whether we made the id."""

    id: str
    data: bytes
    is_ours: bool

    def read(self) -> Item:
        item: Item = orjson.loads(self.data)
        return item

    @property
    def num_bytes(self) -> int:
        return len(self.data) + ITEM_BYTES


class Kept(tuple[KeptItem, ...]):
    """Items as they are kept."""

    __slots__ = ()

    @classmethod
    def of(cls, items: Iterable[Item], chosen: Collection[str] = ()) -> Kept:
        """chosen: the ids among theirs that are a client's own."""
        return cls(KeptItem(item["id"], _json(item), item["id"] not in chosen) for item in items)

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one response added: its input items, then its output items. previous: the turn before it.

    num_bytes: its own; conversation_bytes: with all that came before it."""

    given: Kept
    said: Kept
    previous: Turn | None
    num_bytes: int
    conversation_bytes: int

    @classmethod
    def of(cls, given: Kept, said: Kept, previous: Turn | None) -> Turn:
        num_bytes = TURN_BYTES + given.num_bytes + said.num_bytes
        return cls(given, said, previous, num_bytes, num_bytes + (previous.conversation_bytes if previous else 0))

    @property
    def items(self) -> tuple[KeptItem, ...]:
        return (*self.given, *self.said)

    @property
    def findable(self) -> Collection[str]:
        """Ids, each once."""
        return {item.id: None for item in self.items if item.is_ours}.keys()

    def conversation(self) -> list[KeptItem]:
        """All items up to the end of this turn."""
        turns = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return [item for turn in reversed(turns) for item in turn.items]


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """body: the response as it was answered (JSON). turn: the last of its conversation, its own. may_cancel: to cancel
    it changes nothing and is no mistake. events: of one whose stream may be taken up again."""

    id: str
    owner: str
    body: bytes
    turn: Turn
    may_cancel: bool
    events: EventLog | None

    @property
    def num_bytes(self) -> int:
        """Without its turns."""
        return len(self.body) + ENTRY_BYTES + (self.events.num_bytes if self.events is not None else 0)

    def input_items(self) -> list[KeptItem]:
        """What the model was given: everything before this response, and its own input."""
        before = self.turn.previous
        return [*(before.conversation() if before is not None else ()), *self.turn.given]

    def history(self) -> list[KeptItem]:
        """All items of the conversation."""
        return self.turn.conversation()


class ResponseStore:
    """Either bound may be 0: then nothing is kept."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first
        self._num_uses: dict[Turn, int] = {}  # by how many kept responses and later turns
        self._turns_of: dict[tuple[str, str], list[Turn]] = {}  # owner, item id -> the kept turns that have it
        self._num_bytes = 0
        self._bytes_of: Counter[str] = Counter()  # the same by owner
        self._num_reserved = 0
        self._reserved_of: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def num_reserved(self) -> int:
        """Bytes that running responses hold; with `num_bytes` at most the bound."""
        return self._num_reserved

    @property
    def keeps_nothing(self) -> bool:
        return self._max_responses < 1 or self._max_bytes < 1

    def reserve(self, num_bytes: int, owner: str = "") -> bool:
        """Room for what a running response gathers, taken from those that are kept; False if all of it is reserved, or
        half of it by this one of several owners."""
        with self._lock:
            own = self._reserved_of[owner] + num_bytes
            if self._num_reserved + num_bytes > self._max_bytes or (owner and own > self._max_bytes // 2):
                return False
            self._num_reserved += num_bytes
            self._reserved_of[owner] = own
            self._shrink()
        return True

    def release(self, num_bytes: int, owner: str = "") -> None:
        """Give back what was reserved."""
        with self._lock:
            self._num_reserved -= num_bytes
            self._reserved_of[owner] -= num_bytes

    def of(self, owner: str) -> Shelf:
        """owner: the id of an account; empty where there are no keys."""
        return Shelf(self, owner)

    def put(
        self,
        response: Item,
        owner: str,
        given: Kept,
        previous: StoredResponse | None = None,
        events: EventLog | None = None,
    ) -> bool:
        """Keep a response. given: its own input items; previous: the response it continues, of the same owner; events:
        grow no more.

        False if there is no room for it alone; then the others stay."""
        said = Kept.of(map(_without_logprobs, response["output"]))
        turn = Turn.of(given, said, previous.turn if previous is not None else None)
        may_cancel = bool(response.get("background")) or response.get("status") == "cancelled"
        entry = StoredResponse(response["id"], owner, _json(response), turn, may_cancel, events)
        num_bytes = entry.num_bytes + turn.conversation_bytes
        with self._lock:
            if self.keeps_nothing or num_bytes + self._num_reserved > self._max_bytes:
                return False
            self._forget(entry.id)
            self._keep(entry)
            self._shrink()
        return True

    def get(self, id: str, owner: str) -> StoredResponse | None:
        """The response, which now counts as used; None also for another owner's."""
        with self._lock:
            entry = self._kept.get(id)
            if entry is None or entry.owner != owner:
                return None
            self._kept.move_to_end(id)
            return entry

    def delete(self, id: str, owner: str) -> bool:
        """Whether it was there."""
        with self._lock:
            entry = self._kept.get(id)
            return entry is not None and entry.owner == owner and self._forget(id)

    def find_items(self, ids: Collection[str], owner: str) -> dict[str, KeptItem]:
        """The items of these ids, which we made, in the owner's kept responses; one that is not there is left out."""
        with self._lock:
            turns = {turns[-1]: None for id in ids if (turns := self._turns_of.get((owner, id)))}
        items = [item for turn in turns for item in turn.items]
        wanted = set(ids)
        return {item.id: item for item in items if item.is_ours and item.id in wanted}

    def _shrink(self) -> None:
        """One after another goes until the rest is within the bounds."""
        kept = self._kept
        while kept and (
            len(kept) > self._max_responses or self._num_bytes + self._num_reserved > self._max_bytes
        ):  # fmt: skip
            self._forget(self._first_to_go())

    def _first_to_go(self) -> str:
        """The newest goes last."""
        newest = next(reversed(self._kept))
        for owner, _ in self._bytes_of.most_common():
            for id, entry in self._kept.items():
                if entry.owner == owner and id != newest:
                    return id
        return newest

    def _count(self, owner: str, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._bytes_of[owner] += num_bytes
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]

    def _keep(self, entry: StoredResponse) -> None:
        self._kept[entry.id] = entry
        self._count(entry.owner, entry.num_bytes)
        turn: Turn | None = entry.turn
        while turn is not None:
            uses = self._num_uses.get(turn, 0)
            self._num_uses[turn] = uses + 1
            if uses:
                break
            self._count(entry.owner, turn.num_bytes)
            for id in turn.findable:
                self._turns_of.setdefault((entry.owner, id), []).append(turn)
            turn = turn.previous

    def _forget(self, id: str) -> bool:
        entry = self._kept.pop(id, None)
        if entry is None:
            return False
        self._count(entry.owner, -entry.num_bytes)
        if entry.events is not None:
            entry.events.drop()  # also from under those who read it: they might take any time
        turn: Turn | None = entry.turn
        while turn is not None:
            self._num_uses[turn] -= 1
            if self._num_uses[turn]:
                break
            self._drop(turn, entry.owner)
            turn = turn.previous
        return True

    def _drop(self, turn: Turn, owner: str) -> None:
        del self._num_uses[turn]
        self._count(owner, -turn.num_bytes)
        for id in turn.findable:
            turns = self._turns_of[owner, id]
            turns.remove(turn)
            if not turns:
                del self._turns_of[owner, id]


@dataclass(frozen=True, slots=True)
class Shelf:
    """A store as one owner sees it."""

    store: ResponseStore
    owner: str

    def put(
        self,
        response: Item,
        given: Kept,
        previous: StoredResponse | None = None,
        events: EventLog | None = None,
    ) -> bool:
        return self.store.put(response, self.owner, given, previous, events)

    def get(self, id: str) -> StoredResponse | None:
        return self.store.get(id, self.owner)

    def delete(self, id: str) -> bool:
        return self.store.delete(id, self.owner)

    def find_items(self, ids: Collection[str]) -> dict[str, KeptItem]:
        return self.store.find_items(ids, self.owner)


def _json(value: Item) -> bytes:
    """In no more memory than it needs: what orjson returns keeps the room it was written in, 4 KB for 30 bytes."""
    return bytes(memoryview(orjson.dumps(value)))


def _without_logprobs(item: Item) -> Item:
    """An output item as a conversation needs it: the response's own body tells its logprobs, a hundred times the text
    at worst."""
    parts: Sequence[Item] = item.get("content") or ()
    if not any(part.get("logprobs") for part in parts):
        return item
    return item | {"content": [part | {"logprobs": []} if "logprobs" in part else part for part in parts]}
