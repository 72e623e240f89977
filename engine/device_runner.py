"""`DeviceRunner`: `ModelRunner` for a device whose steps run on by themselves.

`launch` issues a whole step - one upload, the model, the draw, one copy back - and returns; `result` waits for that
copy, the step's only wait for the device. A row's newest token is stored where the next step reads it, so that one can
be issued before the host has seen it. Rows with a grammar are the exception: what they drew is read in `launch` of the
next step, behind its forward and before its draw.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.batch import RowOutput, ScheduledBatch, StepOutput
from engine.device import Lane, Stamp
from engine.device_batch import StagedBatch, StepLayout, metadata_of, new_buffers, part_of
from engine.device_ops import BatchBuffers
from engine.device_rows import DeviceRows
from engine.kv.cache import KVCache
from engine.models.backbone import Backbone
from engine.pooling import Pooler
from engine.prompt_results import PromptResults
from engine.runner import NO_EMBEDDINGS, NO_PROMPT_LOGPROBS, join_told, warm_up_batches
from engine.sampling.device_sampler import DeviceSampler, Draw
from engine.step_buffers import Download, DownloadRing, Staged, Upload, UploadRing
from engine.structured import GrammarStore


class Graphs(Protocol):
    """Recorded forwards of one token per sequence (engine/cuda_graph.py)."""

    def bucket_for(self, num_seqs: int) -> int | None:
        """The smallest bucket for so many sequences; None if there is none."""
        ...

    def buffers(self, bucket: int) -> BatchBuffers:
        """What the bucket's next replay computes; of `bucket` sequences, to be filled up with padding."""
        ...

    def replay(self, bucket: int) -> Tensor:
        """Hidden states [bucket, hidden_size], valid until the next replay."""
        ...


class DeviceStepHandle:
    """A step that was launched. Steps are to be read in the order of their launch."""

    def __init__(
        self,
        batch: ScheduledBatch,
        layout: StepLayout,
        download: Download,
        prompts: PromptResults,
        draw: Draw | None,
        stamps: tuple[Stamp, Stamp, Stamp],
    ) -> None:
        """stamps: before the forward, behind it, behind the draw."""
        self._batch, self._layout, self._download = batch, layout, download
        self._prompts, self._draw, self._stamps = prompts, draw, stamps
        self._output: StepOutput | Exception | None = None

    @property
    def is_over(self) -> bool:
        return self._output is not None

    def has_drawn_for(self, rows: Sequence[int]) -> bool:
        return not set(rows).isdisjoint(self._layout.sampled_rows.tolist())

    def result(self) -> StepOutput:
        """Waits, the first time."""
        if self._output is None:
            try:
                self._download.wait()
                self._output = self._read()
            except Exception as error:
                self._output = error
        if isinstance(self._output, Exception):
            raise self._output
        return self._output

    def _read(self) -> StepOutput:
        told = self._prompts.read()
        outputs = [RowOutput()] * len(self._batch.rows)
        for index, each in told.items():
            outputs[index] = each
        if self._draw is not None:
            for index, output in zip(self._layout.sampled, self._draw.read(), strict=True):
                outputs[index] = output if index not in told else join_told(told[index], output)
        began, computed, drawn = self._stamps
        sampling_s = None if self._draw is None else drawn.seconds_since(computed)
        return StepOutput(self._batch.step_id, tuple(outputs), computed.seconds_since(began), sampling_s)


@dataclass(frozen=True, slots=True)
class _Forward:
    """bucket: of the graph that computes it; None: no graph does."""

    bucket: int | None
    batch: StagedBatch
    wanted: Staged  # [num_logits], int64: flat tokens


class DeviceRunner:
    """vocab_size: token ids that may be sampled, at most the model's. pipeline_depth: steps that may be launched and
    not read. graphs: for steps that only decode; None: there are none."""

    def __init__(
        self,
        backbone: Backbone,
        kv_cache: KVCache,
        lane: Lane,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        pipeline_depth: int = 2,
        grammars: GrammarStore | None = None,
        graphs: Graphs | None = None,
    ) -> None:
        self.backbone = backbone
        self.kv_cache = kv_cache
        self.rows = DeviceRows(max_num_seqs, max_model_len, kv_cache.block_size, lane.device)
        self.sampler = DeviceSampler(max_num_seqs, vocab_size, lane.device, grammars)
        self.pooler = Pooler()
        self._graphs = graphs
        self._lane = lane
        self._max_num_batched_tokens = max_num_batched_tokens
        self._depth = pipeline_depth
        width = self.rows.block_tables.shape[1]
        self._buffers = new_buffers(max_num_batched_tokens, max_num_seqs, width, lane.device)
        ring = pipeline_depth + 1
        self._uploads, self._late_uploads = UploadRing(lane, ring), UploadRing(lane, ring)
        self._downloads = DownloadRing(lane, ring)
        self._unread: deque[DeviceStepHandle] = deque()

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> DeviceStepHandle:
        """Issue the deltas, the block copies, the forward and the draw of a step. Waits for the device only if
        pipeline_depth steps are not read, or where a grammar must know what the last step drew."""
        self._read_until(self._depth - 1)
        try:
            handle = self._launch(batch)
        except BaseException:
            self._lane.synchronize()  # what was issued may still read the staging buffers of this step
            raise
        self._unread.append(handle)
        return handle

    def _read_until(self, num_unread: int) -> None:
        """Read the oldest steps until so many are left."""
        while self._unread and (self._unread[0].is_over or len(self._unread) > num_unread):
            handle = self._unread.popleft()
            if not handle.is_over:
                handle.result()

    def _launch(self, batch: ScheduledBatch) -> DeviceStepHandle:
        self._take_rows(batch)
        layout, upload, download = StepLayout.of(batch), self._uploads.begin(), self._downloads.begin()
        deltas = self.rows.stage(batch, upload)
        counts = self.sampler.counts.stage(batch.new_rows, upload)
        copies = upload.add(np.array(batch.block_copies, dtype=np.int64)) if batch.block_copies else None
        prompts = PromptResults(batch, layout, self.pooler, self.sampler.rows.of)
        prompts.stage(self.rows, upload)
        forward = self._stage_forward(layout, prompts, upload)
        is_late = self._must_read_first(layout)
        draw = None if is_late else self._stage_draw(layout, upload)
        upload.send()

        deltas.apply()
        if counts is not None:
            counts.load(self.rows.token_ids)
        if copies is not None:
            ops.copy_blocks(self.kv_cache.buffers, copies.tensor)
        began = self._lane.stamp()
        logits = self._compute(forward, layout, prompts, download)
        computed = self._lane.stamp()
        if is_late:
            self._read_until(0)  # meanwhile the device has this step's forward to work on
            late = self._late_uploads.begin()
            draw = self._stage_draw(layout, late)
            late.send()
        if draw is not None:
            draw.run(logits, download)
        drawn = self._lane.stamp()
        download.send()
        return DeviceStepHandle(batch, layout, download, prompts, draw, (began, computed, drawn))

    def _must_read_first(self, layout: StepLayout) -> bool:
        """Whether a row's draw depends on a token that is not read yet."""
        rows = self.sampler.rows_with_grammars(layout.sampled_rows)
        return bool(rows) and any(not handle.is_over and handle.has_drawn_for(rows) for handle in self._unread)

    def _take_rows(self, batch: ScheduledBatch) -> None:
        """The host's part of the deltas. No unread step names a row that is freed or taken."""
        self.rows.take(batch)
        for freed in batch.freed_rows:
            self.sampler.grammars.clear(freed)
        for new in batch.new_rows:
            self.sampler.set(new)
            self.pooler.begin(new)

    def _stage_forward(self, layout: StepLayout, prompts: PromptResults, upload: Upload) -> _Forward:
        bucket = None
        if self._graphs is not None and layout.max_query_len == 1 and not prompts.wants_hidden_states:
            bucket = self._graphs.bucket_for(layout.num_seqs)
        if self._graphs is None or bucket is None:
            to = part_of(self._buffers, layout, self.rows.block_size)
        else:
            to = self._graphs.buffers(bucket)
        return _Forward(bucket, StagedBatch.of(layout, to, upload), upload.add(layout.logits_tokens))

    def _compute(self, forward: _Forward, layout: StepLayout, prompts: PromptResults, download: Download) -> Tensor:
        """Logits [num_logits, vocab], float32; of a step that draws nothing it may be anything."""
        backbone, wanted = self.backbone, forward.wanted.tensor
        buffers = forward.batch.prepare(self.rows)
        inputs = buffers.input_ids, buffers.positions, metadata_of(buffers, layout)
        if self._graphs is not None and forward.bucket is not None:
            hidden_states = self._graphs.replay(forward.bucket)
        elif not backbone.tells_hidden_states:
            prompts.refuse(NO_PROMPT_LOGPROBS, NO_EMBEDDINGS)
            return backbone.forward(*inputs, wanted)
        elif prompts.wants_hidden_states or not layout.sampled:
            hidden_states = backbone.hidden_states(*inputs)
            prompts.ask(hidden_states, backbone.logits, self.sampler.vocab_size, download)
        else:
            return backbone.forward(*inputs, wanted)
        return backbone.logits(hidden_states.index_select(0, wanted)) if layout.sampled else hidden_states

    def _stage_draw(self, layout: StepLayout, upload: Upload) -> Draw | None:
        if not layout.sampled:
            return None
        return self.sampler.stage(layout.source, layout.sampled_rows, layout.sampled_ends, self.rows, upload)

    def warm_up(self) -> None:
        """The steps of `warm_up_batches`, in all ways that steps are taken."""
        longest = self.rows.token_ids.shape[1] - 1
        for batch in warm_up_batches(self.kv_cache, min(self._max_num_batched_tokens, longest)):
            self.launch(batch).result()
