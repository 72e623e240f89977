"""Buckets, static buffers and padding of recorded decode steps, with a model of one line and a recorder of the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from engine import device_ops
from engine.cuda_graph import CudaRecorder, DecodeGraphs, Graph, decode_buckets, first_of, padding
from engine.device_ops import BatchBuffers
from tests.engine.run_again import RecorderOfRuns
from tests.ops.device_reference import device_ops_on_cpu  # noqa: F401

BLOCK, WIDTH, CPU = 16, 4, torch.device("cpu")


class Model:
    """A cache slot takes position + 1000 * id; a sequence's result is the sum over its slots: [num_seqs, 2], the
    second column the id itself. Like a forward it sees only the buffers."""

    def __init__(self, num_blocks: int) -> None:
        self.cache = torch.zeros(num_blocks * BLOCK, dtype=torch.int64)

    def __call__(self, buffers: BatchBuffers) -> Tensor:
        written = buffers.slot_mapping >= 0
        self.cache[buffers.slot_mapping[written]] = (buffers.positions + 1000 * buffers.input_ids)[written]
        place = torch.arange(WIDTH * BLOCK)
        slots = buffers.block_tables.long()[:, place // BLOCK] * BLOCK + place % BLOCK
        seen = self.cache[slots.clamp(min=0)] * (place < buffers.seq_lens[:, None])
        return torch.stack([seen.sum(1), buffers.input_ids[buffers.logits_indices]], 1)


def rows_of(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids and block tables of 9 rows, and how many tokens each has, the last of them not computed."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 500, (9, WIDTH * BLOCK), generator=generator, dtype=torch.int32)
    tables = torch.randperm(9 * WIDTH, generator=generator).int().view(9, WIDTH)
    return ids, tables, torch.randint(1, WIDTH * BLOCK, (9,), generator=generator, dtype=torch.int32)


@torch.inference_mode()
def step(graphs: DecodeGraphs, rows: list[int], seed: int = 0) -> tuple[int, Tensor]:
    """One decode step of these rows in the bucket they get."""
    ids, tables, lengths = rows_of(seed)
    bucket = graphs.bucket_for(len(rows))
    assert bucket is not None
    padded = torch.tensor(rows + [-1] * (bucket - len(rows)))
    computed = torch.where(padded >= 0, lengths[padded.clamp(min=0)] - 1, 0).int()
    ones = torch.ones(bucket, dtype=torch.int32)
    device_ops.prepare_batch(ids, tables, BLOCK, padded, computed, ones, graphs.buffers(bucket))
    return bucket, graphs.replay(bucket)[: len(rows)]


class Recorder(RecorderOfRuns):
    """calls: what was asked, each with the number of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        self.calls.append(("warm up", len(run())))

    def record(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        graph, result = super().record(run)
        self.calls.append(("record", len(result)))
        return graph, result


def captured(model: Model, buckets: tuple[int, ...] = (1, 2, 4, 8)) -> tuple[DecodeGraphs, Recorder]:
    recorder = Recorder()
    graphs = DecodeGraphs(model, recorder, buckets=buckets, table_width=WIDTH, device=CPU)
    graphs.capture()
    return graphs, recorder


@pytest.mark.parametrize(
    ("most", "want"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (7, (1, 2, 4, 7)),
        (64, (1, 2, 4, 8, 16, 24, 32, 48, 64)),
        (200, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200)),
        (256, (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)),
    ],
)
def test_buckets(most: int, want: tuple[int, ...]) -> None:
    assert decode_buckets(most) == want


def test_a_batch_gets_the_smallest_bucket_that_holds_it() -> None:
    graphs, _ = captured(Model(36), (1, 2, 4, 9))
    assert [graphs.bucket_for(n) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 9, 9]
    assert graphs.bucket_for(10) is None
    assert graphs.bucket_for(0) is None


def test_the_largest_is_recorded_first_each_after_a_warm_up() -> None:
    model = Model(36)
    _, recorder = captured(model)
    assert recorder.calls == [(what, n) for n in (8, 4, 2, 1) for what in ("warm up", "record")]
    assert not model.cache.any(), "padding wrote a block"


@pytest.mark.usefixtures("device_ops_on_cpu")
def test_replays_compute_what_the_model_does() -> None:
    """Over buckets in any order: nothing of an earlier batch is seen, padding writes nothing."""
    graphs, _ = captured(model := Model(36))
    plain = Model(36)
    for turn, rows in enumerate(([3, 1, 4, 0, 8], [5], [7, 2, 6], [3, 1], [0, 1, 2, 3, 4, 5, 6, 7], [8])):
        ids, tables, lengths = rows_of(turn)
        bucket, got = step(graphs, rows, seed=turn)
        assert bucket >= len(rows)
        exact = padding(len(rows), WIDTH, CPU)
        where = torch.tensor(rows)
        ones = torch.ones(len(rows), dtype=torch.int32)
        device_ops.prepare_batch(ids, tables, BLOCK, where, lengths[where] - 1, ones, exact)
        assert torch.equal(got, plain(exact))
        assert torch.equal(model.cache, plain.cache)


def test_buffers_of_a_smaller_bucket_are_the_first_of_all() -> None:
    whole = padding(6, WIDTH, CPU)
    part = first_of(whole, 2)
    assert [len(tensor) for tensor in part] == [2, 2, 2, 3, 2, 2, 2]
    assert part.block_tables.is_contiguous()
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(part, whole, strict=True))


def test_a_bucket_that_was_not_recorded_is_no_bucket() -> None:
    graphs = DecodeGraphs(Model(36), RecorderOfRuns(), buckets=(1, 2), table_width=WIDTH, device=CPU)
    with pytest.raises(KeyError):
        graphs.replay(1)


class FakeCuda:
    """As much of torch.cuda as a recorder uses. A recording that fails leaves its stream current, as torch's does."""

    CUDAGraph = object

    def __init__(self) -> None:
        self.current = "the thread's"

    def Stream(self, device: torch.device) -> str:
        return "the recorder's"

    def graph_pool_handle(self) -> int:
        return 7

    def current_stream(self, device: torch.device) -> str:
        return self.current

    @contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: object, *, pool: int, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield  # an error leaves here
        self.current = before


def test_the_threads_stream_is_current_after_a_recording_and_after_one_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda()
    monkeypatch.setattr(torch, "cuda", cuda)
    recorder = CudaRecorder(CPU)
    recorded_on = []

    def run() -> Tensor:
        recorded_on.append(cuda.current)
        return torch.ones(len(recorded_on))

    _, result = recorder.record(run)
    assert torch.equal(result, torch.ones(1))
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: run() / (1 // 0))
    assert recorded_on == ["the recorder's"] * 2
    assert cuda.current == "the thread's"
