"""What a step sends to its device and fetches from it: arrays packed into one staging buffer, copied as one.

Knows bytes, not what they mean. Arrays are added, then sent together; from then on each has its view on the other
side. Staging memory is a ring: a buffer is written anew only when the step that used it `length` steps ago is over.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.device import Lane, Mark

ALIGNMENT = 16  # bytes, of every array in a buffer
LEAST_BYTES = 16 << 10

DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
ARRAY_DTYPES = {tensor: array for array, tensor in DTYPES.items()}
Bytes = npt.NDArray[np.uint8]
NOT_SENT = torch.empty(0)


def _room(num_bytes: int, before: int) -> int:
    """Bytes of a buffer that is to hold num_bytes, having been of `before`."""
    return max(LEAST_BYTES, num_bytes, 2 * before)


class Staged:
    """An array on its way to the device."""

    __slots__ = ("array", "tensor")

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.tensor = NOT_SENT  # then the array's shape and dtype, on the device


class Upload:
    """The arrays of one step; their views are valid until the next upload of the same ring is sent."""

    def __init__(self, ring: UploadRing) -> None:
        self._ring = ring
        self._items: list[Staged] = []

    def add(self, array: npt.NDArray[Any]) -> Staged:
        """array: of a dtype in DTYPES; not to be changed before it is sent."""
        item = Staged(array)
        self._items.append(item)
        return item

    def send(self) -> None:
        """One copy for all. Nothing may be added afterwards."""
        self._ring.send(self._items)


class UploadRing:
    """length: steps whose copies may not have run yet, and the one that is being built."""

    def __init__(self, lane: Lane, length: int) -> None:
        self._lane = lane
        self._staging = [lane.staging(LEAST_BYTES) for _ in range(length)]
        self._next = 0
        self._device = torch.empty(LEAST_BYTES, dtype=torch.uint8, device=lane.device)

    def begin(self) -> Upload:
        return Upload(self)

    def send(self, items: list[Staged]) -> None:
        ends, end = [], 0
        for item in items:
            end = -(-end // ALIGNMENT) * ALIGNMENT + item.array.nbytes
            ends.append(end)
        staging = self._take(end)
        bytes_of: Bytes = staging.numpy()
        for item, stop in zip(items, ends, strict=True):
            bytes_of[stop - item.array.nbytes : stop] = np.ascontiguousarray(item.array).reshape(-1).view(np.uint8)
        self._lane.to_device(staging[:end], self._device[:end])
        for item, stop in zip(items, ends, strict=True):
            flat = self._device[stop - item.array.nbytes : stop].view(DTYPES[item.array.dtype])
            item.tensor = flat.view(item.array.shape)

    def _take(self, num_bytes: int) -> Tensor:
        """The next staging buffer. A longer one on the device, if need be: what reads the old one was issued before,
        and memory is handed out again in the order of the stream."""
        index, self._next = self._next, (self._next + 1) % len(self._staging)
        if len(self._staging[index]) < num_bytes:
            self._staging[index] = self._lane.staging(_room(num_bytes, len(self._staging[index])))
        if len(self._device) < num_bytes:
            room = _room(num_bytes, len(self._device))
            self._device = torch.empty(room, dtype=torch.uint8, device=self._lane.device)
        return self._staging[index]


class Fetched:
    """A tensor on its way to the host. Its array may be read once the download has arrived, and must be used before
    the ring comes round."""

    __slots__ = ("array", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.array: npt.NDArray[Any] = np.empty(() if tensor.numel() else tensor.shape, ARRAY_DTYPES[tensor.dtype])


class Download:
    """The tensors that one step fetches."""

    def __init__(self, ring: DownloadRing) -> None:
        self._ring = ring
        self._items: list[Fetched] = []
        self._mark: Mark | None = None

    def add(self, tensor: Tensor) -> Fetched:
        """tensor: of a dtype in DTYPES, on the device."""
        item = Fetched(tensor)
        self._items.append(item)
        return item

    def send(self) -> None:
        """One copy for all, behind everything that was issued before. Nothing may be added afterwards."""
        self._mark = self._ring.send(self._items)

    def wait(self) -> None:
        """Until all of it is there."""
        assert self._mark is not None, "a download is sent, then waited for"
        self._mark.wait()


class DownloadRing:
    """length: steps whose results may not have been read yet, and the one that is being built."""

    def __init__(self, lane: Lane, length: int) -> None:
        self._lane = lane
        self._staging = [lane.staging(LEAST_BYTES) for _ in range(length)]
        self._next = 0

    def begin(self) -> Download:
        return Download(self)

    def send(self, items: list[Fetched]) -> Mark:
        packed = sorted((i for i in items if i.tensor.numel()), key=lambda item: -item.tensor.element_size())
        if not packed:
            return self._lane.mark()  # the step is over when its work is
        parts = [item.tensor.contiguous().view(-1).view(torch.uint8) for item in packed]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        staging = self._take(len(whole))
        mark = self._lane.to_host(whole, staging[: len(whole)])
        bytes_of, begin = staging.numpy(), 0
        for item, part in zip(packed, parts, strict=True):
            flat = bytes_of[begin : begin + len(part)].view(ARRAY_DTYPES[item.tensor.dtype])
            item.array = flat.reshape(item.tensor.shape)
            begin += len(part)
        return mark

    def _take(self, num_bytes: int) -> Tensor:
        index, self._next = self._next, (self._next + 1) % len(self._staging)
        if len(self._staging[index]) < num_bytes:
            self._staging[index] = self._lane.staging(_room(num_bytes, len(self._staging[index])))
        return self._staging[index]
