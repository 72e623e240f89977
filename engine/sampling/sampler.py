"""Logits to token ids: processors, one native draw for all rows, logprobs.

Order per row: processors on the logits, the grammar's mask, temperature, top-k, top-p, min-p, draw
(docs/randomness.md). Rows never look at each other.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import ops
from engine.batch import RowOutput
from engine.beam import num_candidates
from engine.sampling.grammar import GrammarRows
from engine.sampling.logits import PROCESSORS, RowContext, needs_processing
from engine.sampling.logprobs import alternatives, drawn_from
from engine.sampling_params import SamplingParams
from engine.structured import GrammarStore

logger = logging.getLogger("pagemill.engine")

NON_FINITE = "The model produced logits that are not finite."
NOT_PROCESSED = "The request's sampling parameters could not be applied."


class SamplingRows:
    """Sampling parameters of every row as arrays, set when a sequence takes the row."""

    def __init__(self, num_rows: int) -> None:
        self.params: list[SamplingParams | None] = [None] * num_rows
        self.eos_token_ids: list[tuple[int, ...]] = [()] * num_rows
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int32)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.greedy = np.zeros(num_rows, dtype=np.uint8)
        self.seed_key = np.zeros(num_rows, dtype=np.uint64)

    def set(self, row: int, params: SamplingParams, seed_key: int, eos_token_ids: tuple[int, ...]) -> None:
        self.params[row] = params
        self.eos_token_ids[row] = eos_token_ids
        self.temperature[row] = min(params.temperature, float(np.finfo(np.float32).max))
        self.top_k[row] = min(max(params.top_k, 0), 2**31 - 1)
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.greedy[row] = params.greedy
        self.seed_key[row] = seed_key

    def of(self, row: int) -> SamplingParams:
        params = self.params[row]
        assert params is not None, f"row {row} samples before it was set"
        return params


class Sampler:
    """vocab_size: ids that may be sampled; logits rows beyond it (padding of the weights) are banned."""

    def __init__(self, num_rows: int, vocab_size: int, grammars: GrammarStore | None = None) -> None:
        self.rows = SamplingRows(num_rows)
        self.grammars = GrammarRows(num_rows, grammars)
        self.vocab_size = vocab_size

    def sample(
        self, logits: Tensor, source: npt.NDArray[np.int64], rows: Sequence[int], contexts: Sequence[RowContext]
    ) -> list[RowOutput]:
        """logits [num_logits, vocab] float32; source[i] is the logits row that rows[i] samples from.

        The token of rows[i] goes to position len(contexts[i].token_ids). Rows with processors are changed in
        `logits` and put back."""
        logits = logits[:, : self.vocab_size]
        if len(rows) != len(logits):
            logits = logits[torch.from_numpy(source)]
        touched = [i for i, row in enumerate(rows) if needs_processing(self.rows.of(row))]
        raw = logits[touched]  # a copy: logprobs are those of the raw logits, unless asked otherwise
        failed = {i: RowOutput(error=NOT_PROCESSED) for i in touched if not _process(logits[i], contexts[i])}
        failed |= self.grammars.mask(logits, dict(zip(touched, raw, strict=True)), rows, contexts)
        ids = self._draw(logits, rows, contexts)
        processed = [(i, drawn_from(logits[i], c.params)) for i, c in enumerate(contexts) if _tells_drawn(c.params)]
        logits[touched] = raw
        for i, row in processed:
            logits[i] = row
        # a row that failed has id -1; its logprob is not read
        logprobs = ops.logprobs_of(logits, ids.clamp(min=0).unsqueeze(1))[:, 0].tolist()
        outputs = [
            self._output(logits[i], token_id, logprobs[i], contexts[i].params)
            for i, token_id in enumerate(ids.tolist())
        ]
        for i, context in enumerate(contexts):
            if context.params.beam is not None and outputs[i].error is None:
                outputs[i] = _candidates(logits[i], context)
        for i, end in failed.items():
            outputs[i] = end
        for i, output in enumerate(outputs):
            if contexts[i].params.structured is not None and self.grammars.take(rows[i], output.token_ids):
                outputs[i] = replace(output, ends=True)
        return outputs

    def _draw(self, logits: Tensor, rows: Sequence[int], contexts: Sequence[RowContext]) -> Tensor:
        table, index = self.rows, np.asarray(rows, dtype=np.int64)
        return ops.sample(
            logits,
            torch.from_numpy(table.temperature[index]),
            torch.from_numpy(table.top_k[index]),
            torch.from_numpy(table.top_p[index]),
            torch.from_numpy(table.min_p[index]),
            torch.from_numpy(table.greedy[index]),
            torch.from_numpy(table.seed_key[index].view(np.int64)),
            torch.tensor([len(c.token_ids) for c in contexts], dtype=torch.int64),
        )

    @staticmethod
    def _output(logits: Tensor, token_id: int, logprob: float, params: SamplingParams) -> RowOutput:
        if token_id < 0:
            return RowOutput(error=NON_FINITE)
        top = None
        if params.logprobs is not None:
            top = (alternatives(logits, params.logprobs, params.logprob_token_ids),)
        return RowOutput(token_ids=(token_id,), logprobs=(logprob,), top_logprobs=top)


def _candidates(logits: Tensor, context: RowContext) -> RowOutput:
    """What a beam search may go on with after this row; logits: [vocab], as the model made them."""
    count = num_candidates(context.params, context.eos_token_ids)
    return RowOutput(top_logprobs=(alternatives(logits, count),))


def _process(logits: Tensor, context: RowContext) -> bool:
    """Change one row in place. False if its parameters cannot be applied: that is this request's trouble alone."""
    try:
        for processor in PROCESSORS:
            processor(logits, context)
    except (IndexError, ValueError, RuntimeError) as error:
        logger.error("sampling parameters could not be applied", exc_info=error)
        return False
    return True


def _tells_drawn(params: SamplingParams) -> bool:
    return params.logprobs_mode == "processed" and params.logprobs is not None and params.beam is None
