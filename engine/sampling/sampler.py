"""Logits to token ids: processors, one native draw for all rows, logprobs of the raw distribution.

Order per row: processors on the logits, temperature, top-k, top-p, min-p, draw (docs/randomness.md). Rows never
look at each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine import ops
from engine.batch import RowOutput
from engine.outputs import TokenLogprobs
from engine.sampling.logits import PROCESSORS, RowContext, needs_processing
from engine.sampling_params import SamplingParams

NON_FINITE = "The model produced logits that are not finite."


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

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self.rows = SamplingRows(num_rows)
        self.vocab_size = vocab_size

    def sample(
        self, logits: Tensor, source: npt.NDArray[np.int64], rows: Sequence[int], contexts: Sequence[RowContext]
    ) -> list[RowOutput]:
        """logits [num_logits, vocab] float32; source[i] is the logits row that rows[i] samples from.

        The token of rows[i] goes to position len(contexts[i].token_ids)."""
        logits = logits[:, : self.vocab_size].contiguous()
        raw = logits if len(rows) == len(logits) else logits[torch.from_numpy(source)]
        processed = self._process(raw, rows, contexts)
        table, index = self.rows, np.asarray(rows, dtype=np.int64)
        ids = ops.sample(
            processed,
            torch.from_numpy(table.temperature[index]),
            torch.from_numpy(table.top_k[index]),
            torch.from_numpy(table.top_p[index]),
            torch.from_numpy(table.min_p[index]),
            torch.from_numpy(table.greedy[index]),
            torch.from_numpy(table.seed_key[index].view(np.int64)),
            torch.tensor([len(c.token_ids) for c in contexts], dtype=torch.int64),
        )
        # a row that failed has id -1; its logprob is not read
        logprobs = ops.logprobs_of(raw, ids.clamp(min=0)).tolist()
        return [
            self._output(raw[i], token_id, logprobs[i], contexts[i].params) for i, token_id in enumerate(ids.tolist())
        ]

    def _process(self, raw: Tensor, rows: Sequence[int], contexts: Sequence[RowContext]) -> Tensor:
        """Rows with processors change on a copy: logprobs are those of the raw logits."""
        touched = [i for i, row in enumerate(rows) if needs_processing(self.rows.of(row))]
        if not touched:
            return raw
        logits = raw.clone()
        for i in touched:
            for processor in PROCESSORS:
                processor(logits[i], contexts[i])
        return logits

    @staticmethod
    def _output(raw: Tensor, token_id: int, logprob: float, params: SamplingParams) -> RowOutput:
        if token_id < 0:
            return RowOutput(error=NON_FINITE)
        top = None if params.logprobs is None else (top_logprobs(raw, params.logprobs),)
        return RowOutput(token_ids=(token_id,), logprobs=(logprob,), top_logprobs=top)


def top_logprobs(raw: Tensor, count: int) -> TokenLogprobs:
    """The `count` most likely ids of raw [vocab] float32 and their log-softmax; ties: the lower id first."""
    if count == 0:
        return TokenLogprobs((), ())
    # topk leaves the order of ties open; over-fetch, then sort by (-logit, id)
    values, ids = torch.topk(raw, min(count + 32, raw.shape[0]))
    ranked = sorted(zip((-values).tolist(), ids.tolist(), strict=True))[:count]
    chosen = torch.tensor([token_id for _, token_id in ranked], dtype=torch.int64)
    rows = raw.unsqueeze(0).expand(len(ranked), -1).contiguous()
    return TokenLogprobs(tuple(chosen.tolist()), tuple(ops.logprobs_of(rows, chosen).tolist()))
