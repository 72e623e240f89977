"""A recorder of steps for the CPU: what is recorded is run again."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from engine.cuda_graph import Graph


class RunAgain:
    """What a graph does: reads and writes the same memory as when it was recorded."""

    def __init__(self, run: Callable[[], Tensor], result: Tensor) -> None:
        self._run, self._result = run, result
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1
        self._result.copy_(self._run())


class RecorderOfRuns:
    """engine.cuda_graph.Recorder. recorded: what it has given out."""

    def __init__(self) -> None:
        self.recorded: list[RunAgain] = []

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        run()

    def record(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        result = run().clone()
        self.recorded.append(RunAgain(run, result))
        return self.recorded[-1], result
