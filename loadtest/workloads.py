"""Load shapes: what is asked, before anything is sent. A workload and a seed determine every request.

A `Session` is one or more turns of one user, one after another; most workloads have one turn per session.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

from loadtest.lengths import Lengths, UsageError, fixed, lognormal_between, parse_lengths
from loadtest.prompts import Prompt, PromptSource

FEWEST = 3  # sessions of a scaled workload: a median of one request is no median


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request. prompt: what this turn adds; earlier turns and their answers come before it."""

    index: int
    prompt: Prompt
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = 0
    think_s: float = 0.0  # pause before it, after the answer to the turn before


@dataclass(frozen=True, slots=True)
class Session:
    turns: tuple[PlannedRequest, ...]
    arrival_s: float | None = None  # None: closed loop, sent when a worker is free


@dataclass(frozen=True, slots=True)
class Workload:
    """How many sessions of which shape. Lengths are tokens; prefix_len comes on top of prompt_len."""

    name: str
    num_sessions: int
    concurrency: int
    prompt_len: Lengths
    output_len: Lengths
    prefix_len: int = 0  # tokens that all sessions of a prefix group begin with
    prefix_groups: int = 1
    turns: Lengths = field(default_factory=lambda: fixed(1))
    think_s: float = 0.0
    n: int = 1
    temperature: float = 0.0

    def scaled(self, scale: float) -> Workload:
        """The same shape with fewer sessions, but never fewer than keep every worker busy, nor than FEWEST."""
        least = min(max(self.concurrency, FEWEST), self.num_sessions)
        return replace(self, num_sessions=max(least, round(self.num_sessions * scale)))

    def without_n(self) -> Workload:
        """The same work for a server that knows no n: n requests of one choice each, n times as many at once."""
        return replace(self, num_sessions=self.num_sessions * self.n, concurrency=self.concurrency * self.n, n=1)

    def build(self, seed: int, source: PromptSource, arrivals: Sequence[float] = ()) -> list[Session]:
        """The sessions; arrivals: their times in the open loop (one each), empty in the closed loop."""
        random = Random(f"{self.name}-{seed}")
        prefixes = [source.draw(random, self.prefix_len) for _ in range(self.prefix_groups if self.prefix_len else 0)]
        sessions: list[Session] = []
        index = 0
        for number in range(self.num_sessions):
            turns = []
            for turn in range(self.turns.draw(random)):
                prompt = source.draw(random, self.prompt_len.draw(random))
                if prefixes and turn == 0:
                    prompt = source.join(prefixes[number % len(prefixes)], prompt)
                turns.append(
                    PlannedRequest(
                        index, prompt, self.output_len.draw(random), self.n, self.temperature,
                        seed=random.getrandbits(31), think_s=self.think_s if turn else 0.0,
                    )
                )  # fmt: skip
                index += 1
            sessions.append(Session(tuple(turns), arrivals[number] if arrivals else None))
        return sessions


NAMED = {
    workload.name: workload
    for workload in (
        Workload("W1", 8, 1, fixed(128), fixed(128)),
        Workload("W2", 64, 16, lognormal_between(32, 512), lognormal_between(16, 256)),
        Workload("W3", 100, 16, fixed(32), fixed(32), prefix_len=1024),
        Workload("W4", 16, 8, fixed(2000), fixed(64)),
        Workload("W5", 256, 64, fixed(64), fixed(128)),
        Workload("W6", 16, 4, fixed(256), fixed(64), n=4, temperature=1.0),
        Workload("sharegpt", 200, 16, parse_lengths("sharegpt-in"), parse_lengths("sharegpt-out")),
        Workload("alpaca", 200, 16, parse_lengths("alpaca-in"), parse_lengths("alpaca-out")),
        Workload("chat", 32, 8, lognormal_between(16, 128), lognormal_between(16, 128), turns=fixed(4), think_s=0.2),
    )
}


def named_workload(name: str) -> Workload:
    """Raises UsageError."""
    if name not in NAMED:
        raise UsageError(f"There is no workload {name!r}; there are {', '.join(NAMED)}.")
    return NAMED[name]
