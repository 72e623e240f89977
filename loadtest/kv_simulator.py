"""One request trace through one allocator: who runs, who waits, where the memory goes. Steps, not seconds.

The same rules for every allocator: first come, first served; a prompt is written in the step that admits it; then
every running sequence gets one token per step; if there is no room for it, the sequence admitted last gives its
memory back and comes first in the queue, its tokens kept. So the only difference is the allocator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from loadtest.kv_contiguous import KvAllocator, KvRequest, Usage
from loadtest.lengths import UsageError

SHARES = ("live", "reserved", "internal", "external", "remainder")


@dataclass(slots=True)
class KvOutcome:
    """shares: mean share of the pool over the steps in which a request waits for memory. external: free slots that
    would hold the next request if they lay together; remainder: free slots that would not.
    sharing: tokens of all sequences per live slot. batch: mean sequences running in those steps."""

    name: str
    capacity: int
    num_steps: int = 0
    num_full_steps: int = 0
    num_preemptions: int = 0
    num_tokens: int = 0
    batch: float = 0.0
    max_batch: int = 0
    sharing: float = 1.0
    shares: dict[str, float] = field(default_factory=dict)
    batch_over_time: list[int] = field(default_factory=list)


class Simulation:
    """max_batch: sequences that may run at once, whatever memory says (None: any number)."""

    def __init__(self, allocator: KvAllocator, requests: Sequence[KvRequest], max_batch: int | None = None) -> None:
        self.allocator = allocator
        self.waiting = deque(requests)
        self.running: list[KvRequest] = []
        self.num_tokens = {request.key: request.num_prompt_tokens for request in requests}  # known so far
        self.outcome = KvOutcome(allocator.name, allocator.capacity)
        self._max_batch = max_batch or len(requests)
        self._sums = dict.fromkeys(SHARES, 0)
        self._logical = self._batch = 0

    def run(self) -> KvOutcome:
        """Until every request has all its tokens. Raises UsageError if one can never fit."""
        while self.waiting or self.running:
            self.step()
        outcome, steps = self.outcome, self.outcome.num_full_steps
        if steps:
            outcome.batch = self._batch / steps
            outcome.shares = {name: self._sums[name] / (steps * outcome.capacity) for name in SHARES}
            outcome.sharing = self._logical / self._sums["live"]
        return outcome

    def step(self) -> None:
        self._admit()
        if not self.running:
            raise UsageError(f"A request of {self.waiting[0].final_slots} tokens does not fit: {self.allocator.name}.")
        self._record()
        for request in list(self.running):
            if request in self.running:
                self._decode(request)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_batch:
            request = self.waiting[0]
            if not self.allocator.admit(request, self.num_tokens[request.key]):
                return
            self.running.append(self.waiting.popleft())

    def _decode(self, request: KvRequest) -> None:
        """The next token; the one before it is written when it is not the prompt's, or given back with the rest."""
        if self.num_tokens[request.key] + 1 == len(request.token_ids):
            self.num_tokens[request.key] += 1
            self.outcome.num_tokens += 1
            self.running.remove(request)
            self.allocator.release(request)
            return
        while not self.allocator.grow(request):
            last = self.running.pop()
            self.allocator.release(last)
            self.waiting.appendleft(last)
            self.outcome.num_preemptions += 1
            if last is request:
                return
        self.num_tokens[request.key] += 1
        self.outcome.num_tokens += 1

    def _record(self) -> None:
        outcome = self.outcome
        outcome.num_steps += 1
        outcome.max_batch = max(outcome.max_batch, len(self.running))
        outcome.batch_over_time.append(len(self.running))
        if not self.waiting or len(self.running) >= self._max_batch:
            return
        usage: Usage = self.allocator.usage()
        needed = self.allocator.slots_to_admit(self.waiting[0], self.num_tokens[self.waiting[0].key])
        outcome.num_full_steps += 1
        self._sums["live"] += usage.live
        self._sums["reserved"] += usage.reserved
        self._sums["internal"] += usage.internal
        self._sums["external" if usage.free >= needed else "remainder"] += usage.free
        self._logical += usage.logical
        self._batch += len(self.running)
