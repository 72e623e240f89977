"""How much may wait: a bound on sequences and prompt tokens, inbox and waiting together, and when there will be room.

Each client has its part of the bound that the others cannot take, so that one client's queue does not cost another
its place. In all at most twice the bound can wait.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from engine.config import SchedulerConfig
from engine.outputs import QueueFull
from engine.sampling_params import InvalidParameter
from engine.terms import Terms

WINDOW_S = 20.0  # over which the service rate is measured
LONGEST_RETRY_S = 60
FULL = "The server is at its limit of waiting requests. Please try again later."


class Rate:
    """Events per second over about WINDOW_S, older ones counting less and less. Time passes only while it is told."""

    def __init__(self) -> None:
        self._seconds = self._events = 0.0

    def count(self, num_events: int, seconds: float) -> None:
        """So many at the end of that time."""
        fading = math.exp(-seconds / WINDOW_S)
        self._events = self._events * fading + num_events
        self._seconds = self._seconds * fading + WINDOW_S * (1 - fading)

    @property
    def per_second(self) -> float:
        return self._events / self._seconds if self._seconds > 0 else 0.0


class Admission:
    """clock: time.monotonic, or a test's. Requests that were let in `start` sooner or later, or end without."""

    def __init__(self, limits: SchedulerConfig, clock: Callable[[], float]) -> None:
        self._max_sequences = limits.max_waiting_requests + limits.max_num_seqs
        self._max_tokens = limits.max_waiting_tokens
        self._clock = clock
        self._starts = Rate()  # while something waits: an idle server's says nothing
        self._counted_s = 0.0
        self._held: dict[str, tuple[int, int]] = {}  # client -> its waiting sequences and tokens
        self.num_sequences = 0
        self.num_tokens = 0

    def enter(self, num_sequences: int, num_tokens: int, terms: Terms) -> None:
        """Raises InvalidParameter for what could never enter, QueueFull."""
        if num_sequences > self._max_sequences or num_tokens > self._max_tokens:
            raise InvalidParameter(
                "prompt",
                f"One request may ask for at most {self._max_sequences} sequences (prompts x n) and "
                f"{self._max_tokens} prompt tokens, this one asks for {num_sequences} and {num_tokens}.",
            )
        held = self._held.get(terms.client, (0, 0))
        if not self._fits(self.num_sequences + num_sequences, self.num_tokens + num_tokens, 1.0) and not self._fits(
            held[0] + num_sequences, held[1] + num_tokens, terms.reserved
        ):
            raise QueueFull(FULL, self.retry_after_s())
        if not self.num_sequences:
            self._counted_s = self._clock()
        self._change(terms.client, num_sequences, num_tokens)

    def start(self, num_sequences: int, num_tokens: int, terms: Terms) -> None:
        """So many have come to an output, or ended."""
        if not num_sequences:
            return
        before, self._counted_s = self._counted_s, self._clock()
        self._starts.count(num_sequences, self._counted_s - before)
        self._change(terms.client, -num_sequences, -num_tokens)

    def retry_after_s(self) -> int:
        """Whole seconds until an eighth of what waits has started at the present rate: who comes back then finds room,
        and so do others."""
        wanted, per_second = max(1.0, self.num_sequences / 8), self._starts.per_second
        return LONGEST_RETRY_S if per_second * LONGEST_RETRY_S <= wanted else math.ceil(wanted / per_second)

    def _fits(self, num_sequences: int, num_tokens: int, share: float) -> bool:
        return num_sequences <= share * self._max_sequences and num_tokens <= share * self._max_tokens

    def _change(self, client: str, num_sequences: int, num_tokens: int) -> None:
        held = self._held.get(client, (0, 0))
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens
        if held[0] + num_sequences:
            self._held[client] = held[0] + num_sequences, held[1] + num_tokens
        else:
            self._held.pop(client, None)
