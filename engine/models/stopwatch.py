"""Seconds per named phase of a start, and how far a phase has come."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor

from engine.progress import Progress


class Stopwatch:
    """A phase entered twice adds up. progress: is told of each phase."""

    def __init__(self, progress: Progress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.progress = progress or Progress()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        self.progress.enter(name)
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started

    def counted(self, tensors: Iterable[tuple[str, Tensor]], num_bytes: int) -> Iterator[tuple[str, Tensor]]:
        """The same, and this phase is as far as they are. num_bytes: of all."""
        progress = self.progress
        progress.total = num_bytes
        for name, tensor in tensors:
            yield name, tensor
            progress.done += tensor.nbytes

    def looked_up(self, tensors: Mapping[str, Tensor], num_bytes: int) -> Mapping[str, Tensor]:
        """The same, and this phase is as far as they have been asked for. num_bytes: of all."""
        self.progress.total = num_bytes
        return _LookedUp(tensors, self.progress)


class _LookedUp(Mapping[str, Tensor]):
    def __init__(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        self._tensors = tensors
        self._progress = progress
        self._names: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        if name not in self._names:
            self._names.add(name)
            self._progress.done += tensor.nbytes
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)
