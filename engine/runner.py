"""`ModelRunner`: one batch in, one token per sampling row out. Owns the per-row state and the KV tensors.

No queues, no threads, no decisions: what to compute is in the `ScheduledBatch`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.batch import NewRow, RowOutput, ScheduledBatch, ScheduledRow, StepOutput
from engine.forward_batch import ForwardBatch, RowTable
from engine.kv.cache import KVCache
from engine.models.backbone import Backbone
from engine.pooling import Pooler
from engine.sampling.logprobs import score_prompt
from engine.sampling.sampler import NON_FINITE, Sampler
from engine.sampling_params import SamplingParams
from engine.structured import GrammarStore

WARM_UP_TOKENS = 64

NO_PROMPT_LOGPROBS = RowOutput(error="This model cannot tell logprobs of its prompt.", error_param="prompt_logprobs")
NO_OUTPUT = RowOutput()
NO_EMBEDDINGS = RowOutput(error="This model cannot make embeddings.", error_param="model")


@dataclass(frozen=True, slots=True)
class StepHandle:
    """On the CPU the step is done when `launch` returns; the handle keeps the interface of devices that run on."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


class ModelRunner:
    """vocab_size: token ids that may be sampled, at most the model's."""

    def __init__(
        self,
        backbone: Backbone,
        kv_cache: KVCache,
        *,
        max_num_seqs: int,
        max_model_len: int,
        vocab_size: int,
        grammars: GrammarStore | None = None,
    ) -> None:
        self.backbone = backbone
        self.kv_cache = kv_cache
        self.table = RowTable(max_num_seqs, max_model_len, kv_cache.block_size)
        self.sampler = Sampler(max_num_seqs, vocab_size, grammars)
        self.pooler = Pooler()

    def launch(self, batch: ScheduledBatch) -> StepHandle:
        """Apply the deltas, copy blocks, run the model, sample, append the sampled tokens to their rows."""
        if torch.is_inference_mode_enabled():  # as in the engine's thread
            return self._launch(batch)
        with torch.inference_mode():
            return self._launch(batch)

    def _launch(self, batch: ScheduledBatch) -> StepHandle:
        self.table.apply(batch)
        for freed in batch.freed_rows:
            self.sampler.grammars.clear(freed)
        for new in batch.new_rows:
            self.sampler.rows.set(new.row, new.params, new.seed_key, new.eos_token_ids)
            self.sampler.grammars.clear(new.row)
            self.pooler.begin(new)
        self.kv_cache.copy_blocks(batch.block_copies)
        forward = ForwardBatch.build(batch, self.table)
        started = time.monotonic()
        logits, scores = self._compute(batch, forward)
        computed = time.monotonic()
        outputs = [NO_OUTPUT] * len(batch.rows)
        for index, told in scores.items():
            outputs[index] = told
        sampling_s = None
        if forward.sampled:
            self._sample(logits, forward, outputs, scores)
            sampling_s = time.monotonic() - computed
        return StepHandle(StepOutput(batch.step_id, tuple(outputs), computed - started, sampling_s))

    def _compute(self, batch: ScheduledBatch, forward: ForwardBatch) -> tuple[Tensor, dict[int, RowOutput]]:
        """Logits [num_logits, vocab] float32 to sample from, and by index into batch.rows what was told of prompts."""
        inputs = forward.input_ids, forward.positions, forward.metadata
        if not forward.scored and not self.pooler.asking(batch):
            return self.backbone.forward(*inputs, forward.logits_indices, forward.spans), {}
        if not self.backbone.tells_hidden_states:
            refused = {index: NO_PROMPT_LOGPROBS for index, _ in forward.scored}
            refused |= dict.fromkeys(self.pooler.asking(batch), NO_EMBEDDINGS)
            return self.backbone.forward(*inputs, forward.logits_indices, forward.spans), refused
        hidden_states = self.backbone.hidden_states(
            *inputs, forward.spans
        )  # logits of a whole prompt would be too large
        scores = self.pooler.pool(batch, hidden_states, forward.ends)
        for index, flat in forward.scored:
            row = batch.rows[index]
            following = self.table.token_ids[row.row, row.scored.start + 1 : row.scored.stop + 1]
            told = score_prompt(
                self.backbone.logits,
                hidden_states[flat : flat + len(row.scored)],
                torch.from_numpy(following.astype(np.int64)),
                self.sampler.rows.of(row.row).prompt_logprobs or 0,
                self.sampler.vocab_size,
            )
            scores[index] = RowOutput(prompt_logprobs=told, error=NON_FINITE if told is None else None)
        return self.backbone.logits(hidden_states[forward.logits_indices]), scores

    def _sample(
        self, logits: Tensor, forward: ForwardBatch, outputs: list[RowOutput], scores: dict[int, RowOutput]
    ) -> None:
        """Fill in outputs of the rows that sample, and append their tokens to the rows."""
        rows, ends, table = forward.sampled_rows, forward.sampled_ends, self.table
        sampled = self.sampler.sample(
            logits, forward.logits_source, rows, ends, table.token_ids, table.num_prompt_tokens
        )
        for index, row, end, output in zip(forward.sampled, rows, ends, sampled, strict=True):
            outputs[index] = output if index not in scores else join_told(scores[index], output)
            if output.token_ids:  # else the row ends, or is told of another token
                table.token_ids[row, end] = output.token_ids[0]

    def warm_up(self, max_num_batched_tokens: int) -> None:
        """The steps of `warm_up_batches`."""
        longest = self.table.token_ids.shape[1] - 1
        for adapter in range(min(self.backbone.num_adapters, 1) + 1):
            for batch in warm_up_batches(self.kv_cache, min(max_num_batched_tokens, longest), adapter):
                self.launch(batch).result()
        self.table.apply(ScheduledBatch(step_id=-1, freed_rows=(0,)))


def warm_up_batches(kv_cache: KVCache, max_tokens: int, adapter: int = 0) -> Iterator[ScheduledBatch]:
    """One step of one token and one of a few blocks on row 0 and block 0 and up, before anybody waits for it: they go
    through the code of every later step. A step of the full budget would take as long as one, to no end.

    The blocks written are free and unhashed, so nothing reads them later."""
    for num_tokens in (1, min(WARM_UP_TOKENS, max_tokens, kv_cache.num_blocks * kv_cache.block_size)):
        num_blocks = -(-num_tokens // kv_cache.block_size)
        new = NewRow(
            row=0,
            token_ids=(0,) * num_tokens,
            num_prompt_tokens=num_tokens,
            block_tables=(tuple(range(num_blocks)),),
            params=SamplingParams(temperature=0.0),
            seed_key=0,
            eos_token_ids=(),
            adapter=adapter,
        )
        row = ScheduledRow(row=0, num_computed=0, num_scheduled=num_tokens, logits_from=0)
        yield ScheduledBatch(step_id=-1, new_rows=(new,), rows=(row,))


def join_told(score: RowOutput, sampled: RowOutput) -> RowOutput:
    """One output of what was told of a row's prompt and what the row has drawn."""
    return score if score.error else sampled._replace(prompt_logprobs=score.prompt_logprobs)
