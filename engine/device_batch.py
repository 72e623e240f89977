"""From a `ScheduledBatch` to the tensors of a forward on the device, which the device makes itself.

The host knows how many tokens every row computes but not always which: the newest may be drawn by a step that still
runs. So it sends rows, counts and places, and `prepare_batch` gathers ids, positions and slots over there. Knows no
model and no sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import device_ops
from engine.attention.base import AttentionMetadata, HostLengths
from engine.batch import ScheduledBatch
from engine.device_ops import BatchBuffers
from engine.device_rows import DeviceRows
from engine.forward_batch import logits_rows
from engine.models.backbone import Backbone
from engine.step_buffers import Staged, Upload

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which rows compute how much, and who samples from what. Sequences are the rows that compute, in batch order.

    logits_tokens: flat places of the tokens whose logits are needed; the last five: as in ForwardBatch, source
    counting in logits_tokens."""

    rows: Int64s  # [num_seqs]
    computed: Int32s  # [num_seqs]
    counts: Int32s  # [num_seqs]
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    logits_tokens: Int64s  # [num_logits]
    sampled: Sequence[int]
    source: Int64s  # [len(sampled)]
    sampled_rows: Int64s  # [len(sampled)]
    sampled_ends: Int64s  # [len(sampled)]
    scored: tuple[tuple[int, int], ...]

    @staticmethod
    def of(batch: ScheduledBatch) -> StepLayout:
        every = np.array([(r.row, r.num_computed, r.num_scheduled) for r in batch.rows], dtype=np.int64)
        computing = np.flatnonzero(every[:, 2])
        rows, computed, counts = every[computing].T
        ends = np.cumsum(counts)
        sampled, sources, wanted = logits_rows(batch)
        place_behind = np.zeros(len(every), dtype=np.int64)  # by index into batch.rows
        place_behind[computing] = ends
        of_sampled = every[np.array(sampled, dtype=np.int64)]
        return StepLayout(
            rows=rows.copy(),
            computed=computed.astype(np.int32),
            counts=counts.astype(np.int32),
            num_tokens=int(ends[-1]),
            max_query_len=int(counts.max()),
            max_seq_len=int((computed + counts).max()),
            logits_tokens=place_behind[np.array(wanted, dtype=np.int64)] - 1,
            sampled=sampled,
            source=np.array(sources, dtype=np.int64),
            sampled_rows=of_sampled[:, 0].copy(),
            sampled_ends=of_sampled[:, 1] + of_sampled[:, 2],
            scored=tuple(
                (i, int(place_behind[i]) - (r.num_computed + r.num_scheduled) + r.scored.start)
                for i, r in enumerate(batch.rows)
                if r.scored
            ),
        )

    @property
    def num_seqs(self) -> int:
        return len(self.rows)


def new_buffers(num_tokens: int, num_seqs: int, table_width: int, device: torch.device) -> BatchBuffers:
    """For batches of up to so many tokens and sequences; block_tables is flat, [num_seqs * table_width]."""

    def whole(size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    return BatchBuffers(
        input_ids=whole(num_tokens, torch.int64),
        positions=whole(num_tokens, torch.int64),
        slot_mapping=whole(num_tokens, torch.int64),
        query_start_loc=whole(num_seqs + 1, torch.int32),
        seq_lens=whole(num_seqs, torch.int32),
        block_tables=whole(num_seqs * table_width, torch.int32),
        logits_indices=whole(num_seqs, torch.int64),
    )


@dataclass(frozen=True, slots=True)
class StagedBatch:
    """What `prepare_batch` needs of a step, padded to `num_seqs` sequences, and where it shall write."""

    rows: Staged
    computed: Staged
    counts: Staged
    to: BatchBuffers

    @staticmethod
    def of(layout: StepLayout, to: BatchBuffers, upload: Upload) -> StagedBatch:
        """to: of as many sequences as the layout has, or more: the others are padding of one token each."""
        padding = len(to.seq_lens) - layout.num_seqs
        return StagedBatch(
            upload.add(np.pad(layout.rows, (0, padding), constant_values=-1) if padding else layout.rows),
            upload.add(np.pad(layout.computed, (0, padding)) if padding else layout.computed),
            upload.add(np.pad(layout.counts, (0, padding), constant_values=1) if padding else layout.counts),
            to,
        )

    def prepare(self, rows: DeviceRows) -> BatchBuffers:
        """After the upload was sent and the rows' deltas are applied."""
        device_ops.prepare_batch(
            rows.token_ids, rows.block_tables, rows.block_size, self.rows.tensor, self.computed.tensor,
            self.counts.tensor, self.to,
        )  # fmt: skip
        return self.to


def part_of(buffers: BatchBuffers, layout: StepLayout, block_size: int) -> BatchBuffers:
    """The beginning of `buffers` that the layout takes, tables as wide as its longest sequence needs."""
    width = -(-layout.max_seq_len // block_size)
    num_seqs = layout.num_seqs
    return BatchBuffers(
        input_ids=buffers.input_ids[: layout.num_tokens],
        positions=buffers.positions[: layout.num_tokens],
        slot_mapping=buffers.slot_mapping[: layout.num_tokens],
        query_start_loc=buffers.query_start_loc[: num_seqs + 1],
        seq_lens=buffers.seq_lens[:num_seqs],
        block_tables=buffers.block_tables[: num_seqs * width].view(num_seqs, width),
        logits_indices=buffers.logits_indices[:num_seqs],
    )


def metadata_of(buffers: BatchBuffers, layout: StepLayout) -> AttentionMetadata:
    return AttentionMetadata(
        block_tables=buffers.block_tables,
        query_start_loc=buffers.query_start_loc,
        seq_lens=buffers.seq_lens,
        slot_mapping=buffers.slot_mapping,
        max_query_len=layout.max_query_len,
        max_seq_len=layout.max_seq_len,
        host=HostLengths(layout.counts, layout.computed + layout.counts),
    )


def decode_forward(backbone: Backbone, max_model_len: int) -> Callable[[BatchBuffers], Tensor]:
    """What engine/cuda_graph.py records: hidden states [num_seqs, hidden_size] of one token per sequence, whatever the
    lengths are by then."""

    def forward(buffers: BatchBuffers) -> Tensor:
        metadata = AttentionMetadata(
            block_tables=buffers.block_tables,
            query_start_loc=buffers.query_start_loc,
            seq_lens=buffers.seq_lens,
            slot_mapping=buffers.slot_mapping,
            max_query_len=1,
            max_seq_len=max_model_len,
        )
        return backbone.hidden_states(buffers.input_ids, buffers.positions, metadata)

    return forward
