"""Responses that clients may ask for later, or continue from: in memory, bounded by count and by bytes; the one that
was not used for the longest time goes first.

What a response added to its conversation is kept once, however many later responses build on it: a conversation of
a hundred turns costs its text, not a hundred times its text. Everything is kept as JSON, so that bytes are what they
seem. Safe to use from several threads.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

Item = dict[str, Any]
ENTRY_BYTES = 1024  # what an entry costs beside its text, roughly
ITEM_BYTES = 256  # and what finding an item by its id costs


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """Items as they are kept: a JSON list, and their ids."""

    data: bytes
    ids: tuple[str, ...]

    @classmethod
    def of(cls, items: Sequence[Item]) -> Kept:
        return cls(orjson.dumps(items), tuple(item["id"] for item in items))

    def items(self) -> list[Item]:
        items: list[Item] = orjson.loads(self.data)
        return items

    @property
    def num_bytes(self) -> int:
        return len(self.data) + len(self.ids) * ITEM_BYTES


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What one response added: its input items, then its output items."""

    given: Kept
    said: Kept

    def items(self) -> list[Item]:
        return self.given.items() + self.said.items()

    @property
    def ids(self) -> tuple[str, ...]:
        return self.given.ids + self.said.ids

    @property
    def num_bytes(self) -> int:
        return self.given.num_bytes + self.said.num_bytes


@dataclass(frozen=True, slots=True, eq=False)
class StoredResponse:
    """body: the response as it was answered (JSON). turns: of its whole conversation, its own last."""

    id: str
    body: bytes
    turns: tuple[Turn, ...]

    @property
    def num_bytes(self) -> int:
        """Without its turns."""
        return len(self.body) + ENTRY_BYTES

    def input_items(self) -> list[Item]:
        """What the model was given: everything before this response, and its own input."""
        return self.history(before_last=True) + self.turns[-1].given.items()

    def history(self, *, before_last: bool = False) -> list[Item]:
        """All items of the conversation; before_last: without this response's own turn."""
        turns = self.turns[:-1] if before_last else self.turns
        return [item for turn in turns for item in turn.items()]


class ResponseStore:
    """max_responses 0 keeps nothing."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()  # least recently used first
        self._num_uses: dict[Turn, int] = {}  # by how many kept responses
        self._turns_of: dict[str, list[Turn]] = {}  # item id -> the kept turns that have it
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def put(self, response: Item, given: Kept, previous: StoredResponse | None = None) -> bool:
        """Keep a response. given: its own input items; previous: the response it continues.

        False if it alone is larger than the store; then the others stay."""
        own = Turn(given, Kept.of(response["output"]))
        turns = (*(previous.turns if previous is not None else ()), own)
        entry = StoredResponse(response["id"], orjson.dumps(response), turns)
        if self._max_responses < 1 or entry.num_bytes + sum(turn.num_bytes for turn in turns) > self._max_bytes:
            return False
        with self._lock:
            self._forget(entry.id)
            self._keep(entry)
            while len(self._kept) > self._max_responses or self._num_bytes > self._max_bytes:
                self._forget(next(iter(self._kept)))
        return True

    def get(self, id: str) -> StoredResponse | None:
        """The response, which now counts as used."""
        with self._lock:
            entry = self._kept.get(id)
            if entry is not None:
                self._kept.move_to_end(id)
            return entry

    def delete(self, id: str) -> bool:
        """Whether it was there."""
        with self._lock:
            return self._forget(id)

    def find_items(self, ids: Collection[str]) -> dict[str, Item]:
        """The items of these ids in the kept responses; one that is not there is left out."""
        with self._lock:
            turns = {self._turns_of[id][-1]: None for id in ids if id in self._turns_of}
        items = [item for turn in turns for item in turn.items()]
        return {item["id"]: item for item in items if item["id"] in ids}

    def _keep(self, entry: StoredResponse) -> None:
        self._kept[entry.id] = entry
        self._num_bytes += entry.num_bytes
        for turn in entry.turns:
            uses = self._num_uses.get(turn, 0)
            self._num_uses[turn] = uses + 1
            if not uses:
                self._num_bytes += turn.num_bytes
                for id in turn.ids:
                    self._turns_of.setdefault(id, []).append(turn)

    def _forget(self, id: str) -> bool:
        entry = self._kept.pop(id, None)
        if entry is None:
            return False
        self._num_bytes -= entry.num_bytes
        for turn in entry.turns:
            self._num_uses[turn] -= 1
            if not self._num_uses[turn]:
                self._drop(turn)
        return True

    def _drop(self, turn: Turn) -> None:
        del self._num_uses[turn]
        self._num_bytes -= turn.num_bytes
        for id in turn.ids:
            self._turns_of[id].remove(turn)
            if not self._turns_of[id]:
                del self._turns_of[id]
