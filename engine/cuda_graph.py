"""Decode steps recorded once per bucket of sequences and replayed: one launch for a forward's hundreds of kernels.

A recorded step reads and writes the same memory every time, so the batch lies in static buffers; a batch of n
sequences runs in the smallest bucket that holds it, filled up with padding (`device_ops.prepare_batch`: rows of -1),
which writes no key and sees none. Whoever has the graphs:

    bucket = graphs.bucket_for(len(rows))              # None: too many, run the forward as usual
    buffers = graphs.buffers(bucket)
    prepare_batch(..., to=buffers)                     # rows, computed and counts padded to the bucket
    hidden_states = graphs.replay(bucket)[: len(rows)]

What is recorded must not wait for the device, must not look at its values, and must launch the same grids for all
batches of a bucket: lengths are bounds (docs/kernels.md). Batches with prompts are not recorded: they run as usual, on
buffers of their own. All calls come from the thread that owns the lane.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from engine.device_ops import BatchBuffers

FINE = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
COARSE = 64  # the step above them


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Ascending; the last one is max_num_seqs. A batch is padded by less than a third above 24 sequences."""
    coarse = range(FINE[-1] + COARSE, max_num_seqs, COARSE)
    return (*(size for size in (*FINE, *coarse) if size < max_num_seqs), max_num_seqs)


class Graph(Protocol):
    def replay(self) -> None:
        """Issue all that was recorded on the current stream."""
        ...


class Recorder(Protocol):
    """What only a device can do."""

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        """Run once without recording: loads kernels, lets libraries allocate what they keep."""
        ...

    def record(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        """The graph of what `run` issues, and its result, which every replay writes anew."""
        ...


class CudaRecorder:
    """Records on a stream of its own, and all graphs into one pool of memory: they never run at once, so what one
    needs between its kernels serves the others. The largest comes first, the others find room in what it took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], Tensor]) -> None:
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], Tensor]) -> tuple[Graph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        current = torch.cuda.current_stream(self._device)  # torch's graph leaves its own behind when a recording fails
        with torch.cuda.stream(current), torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = run()
        return graph, result


class DecodeGraphs:
    """forward: the model on buffers of one bucket, its result [bucket, ...]; best the hidden states behind the last
    norm, for the result of every bucket is kept, and logits of all buckets are hundreds of megabytes."""

    def __init__(
        self,
        forward: Callable[[BatchBuffers], Tensor],
        recorder: Recorder,
        *,
        buckets: tuple[int, ...],  # ascending
        table_width: int,  # blocks of the longest sequence
        device: torch.device,
    ) -> None:
        self._forward = forward
        self._recorder = recorder
        self._buckets = buckets
        self._whole = padding(buckets[-1], table_width, device)
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}

    def bucket_for(self, num_seqs: int) -> int | None:
        """The smallest bucket for so many sequences; None if there is none."""
        place = bisect_left(self._buckets, num_seqs)
        return self._buckets[place] if num_seqs > 0 and place < len(self._buckets) else None

    def buffers(self, bucket: int) -> BatchBuffers:
        """Views of the static buffers that all buckets share: what a larger bucket left there is not seen."""
        return first_of(self._whole, bucket)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every bucket, the largest first, on batches that are all padding: no block is written."""
        for bucket in reversed(self._buckets):
            buffers = self.buffers(bucket)
            nothing = padding(bucket, buffers.block_tables.shape[1], buffers.input_ids.device)
            for to, value in zip(buffers, nothing, strict=True):
                to.copy_(value)

            def run(buffers: BatchBuffers = buffers) -> Tensor:
                return self._forward(buffers)

            self._recorder.warm_up(run)
            self._graphs[bucket] = self._recorder.record(run)

    def replay(self, bucket: int) -> Tensor:
        """Run the step on what lies in `buffers(bucket)`. The next replay overwrites the result [bucket, ...]."""
        graph, result = self._graphs[bucket]
        graph.replay()
        return result


def padding(num_seqs: int, table_width: int, device: torch.device) -> BatchBuffers:
    """A decode batch of nothing but padding."""
    return BatchBuffers(
        input_ids=torch.zeros(num_seqs, dtype=torch.int64, device=device),
        positions=torch.zeros(num_seqs, dtype=torch.int64, device=device),
        slot_mapping=torch.full((num_seqs,), -1, dtype=torch.int64, device=device),
        query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=device),
        seq_lens=torch.zeros(num_seqs, dtype=torch.int32, device=device),
        block_tables=torch.zeros((num_seqs, table_width), dtype=torch.int32, device=device),
        logits_indices=torch.arange(num_seqs, dtype=torch.int64, device=device),
    )


def first_of(whole: BatchBuffers, num_seqs: int) -> BatchBuffers:
    """The part of a decode batch's buffers that a smaller one uses."""
    parts = {name: tensor[:num_seqs] for name, tensor in whole._asdict().items()}
    return BatchBuffers(**parts | {"query_start_loc": whole.query_start_loc[: num_seqs + 1]})
