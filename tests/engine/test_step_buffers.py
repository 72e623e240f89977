"""Arrays there and back: equal, however late the copies come and however much longer a step is than the last."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.step_buffers import DownloadRing, UploadRing
from tests.engine.delayed_lane import DelayedLane

DTYPES = (np.uint8, np.int32, np.int64, np.float32)
Shape = tuple[int, int]


def array_of(index: int, shape: Shape) -> np.ndarray:
    numbers = np.random.default_rng(index).integers(0, 200, shape[0] * shape[1])
    return numbers.astype(DTYPES[index % len(DTYPES)]).reshape(shape)


SHAPES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 700)), max_size=7)


@given(st.lists(SHAPES, min_size=1, max_size=6))
def test_what_is_sent_is_what_is_fetched(steps: list[list[Shape]]) -> None:
    lane = DelayedLane()
    uploads, downloads = UploadRing(lane, 2), DownloadRing(lane, 2)
    for shapes in steps:
        upload, download = uploads.begin(), downloads.begin()
        arrays = [array_of(index, shape) for index, shape in enumerate(shapes)]
        staged = [upload.add(array) for array in arrays]
        upload.send()
        fetched = [download.add(item.tensor) for item in staged]
        download.send()
        download.wait()
        for array, item in zip(arrays, fetched, strict=True):
            assert item.array.dtype == array.dtype
            assert np.array_equal(item.array, array)


def test_several_steps_are_on_their_way() -> None:
    lane = DelayedLane()
    uploads, downloads = UploadRing(lane, 3), DownloadRing(lane, 3)
    under_way = []
    for step in range(7):
        upload, download = uploads.begin(), downloads.begin()
        item = upload.add(np.full(10, step, dtype=np.int32))
        upload.send()
        under_way.append((step, download, download.add(item.tensor * 2)))
        download.send()
        if len(under_way) == 2:
            oldest, arriving, fetched = under_way.pop(0)
            arriving.wait()
            assert fetched.array.tolist() == [2 * oldest] * 10


def test_a_ring_that_is_too_short_is_found_out() -> None:
    lane = DelayedLane()
    uploads = UploadRing(lane, 1)
    for step in range(2):
        upload = uploads.begin()
        upload.add(np.full(10, step, dtype=np.int32))
        upload.send()
    with pytest.raises(AssertionError, match="before its copy was over"):
        lane.synchronize()


def test_a_view_is_aligned_for_its_kernel() -> None:
    upload = UploadRing(DelayedLane(), 1).begin()
    items = [upload.add(np.ones(count, dtype=np.uint8)) for count in (1, 3, 17, 0, 5)]
    upload.send()
    assert [item.tensor.data_ptr() % 16 for item in items] == [0] * 5
    assert [item.tensor.tolist() for item in items] == [[1] * count for count in (1, 3, 17, 0, 5)]


def test_what_is_not_contiguous_arrives_all_the_same() -> None:
    lane = DelayedLane()
    upload, download = UploadRing(lane, 1).begin(), DownloadRing(lane, 1).begin()
    table = np.arange(12, dtype=np.int64).reshape(3, 4)
    item = upload.add(table[:, 1:3])
    upload.send()
    fetched = download.add(item.tensor.T)
    nothing = download.add(torch.empty((0, 3), dtype=torch.float32))
    download.send()
    download.wait()
    assert np.array_equal(fetched.array, table[:, 1:3].T)
    assert nothing.array.shape == (0, 3)
