"""On whose account a request is served, before whom, and until when. Frozen; knows no HTTP."""

from __future__ import annotations

from dataclasses import dataclass

MAX_PRIORITY = 1 << 31


@dataclass(frozen=True, slots=True)
class Terms:
    """client: who asks; those who wait take turns by the tokens they were served, in proportion to `weight`. As many
    names as there are clients: each is remembered.

    reserved: the share of the waiting queue, 0 to 1, that other clients cannot take from this one.
    priority: among the client's own requests those with a lower number come first.
    deadline_s: time.monotonic() at which the request ends with an error if it has not ended before; None: never."""

    client: str = ""
    weight: float = 1.0
    reserved: float = 0.0
    priority: int = 0
    deadline_s: float | None = None


NO_TERMS = Terms()
