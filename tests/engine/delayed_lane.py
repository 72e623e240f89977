"""A lane for tensors of the CPU on which copies come as late as they may: what reads too early finds garbage."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.device import HostLane, Mark

POISON = 0xA5


class DelayedLane(HostLane):
    """A copy to the host arrives when its mark, or a later one, is waited for; until then the host finds POISON.

    The wait also looks whether what was copied to the device was left alone until then: AssertionError if not."""

    def __init__(self) -> None:
        self._issued: list[_Copy] = []

    def staging(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def to_device(self, host: Tensor, out: Tensor) -> None:
        out.copy_(host)
        self._issued.append(_Copy(host, host.clone(), arrives=False))

    def to_host(self, tensor: Tensor, out: Tensor) -> Mark:
        taken = tensor.clone()  # as the stream finds it, whatever is written there afterwards
        out.reshape(-1).view(torch.uint8).fill_(POISON)
        self._issued.append(_Copy(out, taken, arrives=True))
        return self.mark()

    def mark(self) -> Mark:
        return _Delayed(self, self._issued[-1] if self._issued else None)

    def synchronize(self) -> None:
        self.mark().wait()

    def reach(self, last: _Copy | None) -> None:
        if last is None or last not in self._issued:
            return
        while self._issued:
            copy = self._issued.pop(0)
            copy.end()
            if copy is last:
                return


class _Copy:
    def __init__(self, host: Tensor, taken: Tensor, *, arrives: bool) -> None:
        self.host, self.taken, self.arrives = host, taken, arrives

    def end(self) -> None:
        if self.arrives:
            self.host.copy_(self.taken)
        else:
            assert _bytes(self.host) == _bytes(self.taken), "staging memory was written before its copy was over"


class _Delayed:
    def __init__(self, lane: DelayedLane, last: _Copy | None) -> None:
        self._lane, self._last = lane, last

    def wait(self) -> None:
        self._lane.reach(self._last)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
