"""Logits to token ids: one native call that edits and draws all rows, another for the logprobs that were asked for.

Order per row: penalties, biases and bans, the grammar's mask, temperature, top-k, top-p, min-p, draw
(docs/randomness.md). Rows never look at each other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from engine import ops
from engine.batch import RowOutput
from engine.beam import num_candidates
from engine.sampling.grammar import GrammarRows
from engine.sampling.logits import Float32s, Int32s, RowContext, bias_of, biases, is_special, penalties
from engine.sampling.logprobs import Answer, Question, answers
from engine.sampling_params import SamplingParams
from engine.structured import GrammarStore

logger = logging.getLogger("pagemill.engine")

NON_FINITE = "The model produced logits that are not finite."
NOT_PROCESSED = "The request's sampling parameters could not be applied."
ERRORS = {-1: RowOutput(error=NON_FINITE), -2: RowOutput(error=NOT_PROCESSED)}


class SamplingRows:
    """Sampling parameters of every row as arrays, set when a sequence takes the row."""

    def __init__(self, num_rows: int) -> None:
        self.params: list[SamplingParams | None] = [None] * num_rows
        self.eos_token_ids: list[tuple[int, ...]] = [()] * num_rows
        self.bias: list[tuple[Int32s, Float32s] | None] = [None] * num_rows
        self.is_special = [False] * num_rows  # more is to be done than drawing
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int32)
        self.top_p = np.ones(num_rows, dtype=np.float32)
        self.min_p = np.zeros(num_rows, dtype=np.float32)
        self.greedy = np.zeros(num_rows, dtype=np.uint8)
        self.seed_key = np.zeros(num_rows, dtype=np.uint64)
        self.tensors = (  # the same memory, in the order of ops.sample
            torch.from_numpy(self.temperature),
            torch.from_numpy(self.top_k),
            torch.from_numpy(self.top_p),
            torch.from_numpy(self.min_p),
            torch.from_numpy(self.greedy),
            torch.from_numpy(self.seed_key.view(np.int64)),
        )

    def set(self, row: int, params: SamplingParams, seed_key: int, eos_token_ids: tuple[int, ...]) -> None:
        self.params[row] = params
        self.eos_token_ids[row] = eos_token_ids
        self.bias[row] = bias_of(params)
        self.is_special[row] = is_special(params)
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
        self,
        logits: Tensor,  # [num_logits, vocab], float32; only read
        source: Sequence[int],  # [n]: the logits row that each row samples from
        rows: Sequence[int],  # [n]
        lengths: Sequence[int],  # [n]: tokens of each row; the new one goes to this position
        token_ids: Int32s,  # [num_rows, max_len], all rows' tokens
        num_prompt_tokens: Int32s,  # [num_rows]
    ) -> list[RowOutput]:
        """One output per row: one token, a beam search's candidates, or an error that is this row's alone."""
        if logits.shape[1] != self.vocab_size:
            logits = logits[:, : self.vocab_size]
        special = [i for i, row in enumerate(rows) if self.rows.is_special[row]]
        if not special:
            ids = self._draw(logits, source, rows, lengths).tolist()
            return [RowOutput((token_id,)) if token_id >= 0 else ERRORS[token_id] for token_id in ids]
        contexts = {}
        for i in special:
            row = rows[i]
            tokens, num_prompt = token_ids[row, : lengths[i]], int(num_prompt_tokens[row])
            contexts[i] = RowContext(self.rows.of(row), tokens, num_prompt, self.rows.eos_token_ids[row])
        return self._sample_special(logits, source, rows, lengths, contexts)

    def _sample_special(
        self,
        logits: Tensor,
        source: Sequence[int],
        rows: Sequence[int],
        lengths: Sequence[int],
        contexts: dict[int, RowContext],
    ) -> list[RowOutput]:
        """contexts: of the special rows, in ascending order."""
        told = self.grammars.mask(rows, contexts, self.vocab_size)
        banned = {i: context.banned for i, context in contexts.items() if context.banned}
        banned |= {i: (*banned.get(i, ()), *ids) for i, ids in told.banned.items()}
        given = {i: bias for i in contexts if (bias := self.rows.bias[rows[i]]) is not None}
        drawn_rows = [i for i, context in contexts.items() if tells_drawn(context.params)]
        drawn = self._drawn(drawn_rows, len(rows)) if drawn_rows else None
        ids = self._draw(
            logits, source, rows, lengths, penalties=penalties(contexts, len(rows)),
            biases=biases(given, banned, len(rows)), masks=told.masks, drawn=drawn,
        ).tolist()  # fmt: skip
        outputs = [RowOutput((token_id,)) if token_id >= 0 else ERRORS[token_id] for token_id in ids]
        for i, end in told.failed.items():
            outputs[i] = end
        asked = {i: context for i, context in contexts.items() if outputs[i].error is None}
        raw = {i: question_of(source[i], ids[i], c) for i, c in asked.items() if i not in drawn_rows}
        processed = {i: question_of(at, ids[i], contexts[i]) for at, i in enumerate(drawn_rows) if i in asked}
        tell(outputs, _answers(logits, raw), contexts)
        if drawn is not None:
            tell(outputs, _answers(drawn.logits, processed), contexts)
        for i, context in asked.items():
            if context.params.structured is not None and self.grammars.take(rows[i], outputs[i].token_ids):
                outputs[i] = outputs[i]._replace(ends=True)
        return outputs

    def _drawn(self, told: list[int], num_rows: int) -> ops.Drawn:
        of = np.full(num_rows, -1, dtype=np.int64)
        of[told] = np.arange(len(told))
        return ops.Drawn(torch.empty((len(told), self.vocab_size)), torch.from_numpy(of))

    def _draw(
        self,
        logits: Tensor,
        source: Sequence[int],
        rows: Sequence[int],
        lengths: Sequence[int],
        *,
        penalties: ops.Penalties | None = None,
        biases: ops.Biases | None = None,
        masks: ops.Masks | None = None,
        drawn: ops.Drawn | None = None,
    ) -> Tensor:
        is_own = len(rows) == len(logits)  # nobody shares a logits row, and they are in order
        return ops.sample(
            logits,
            *self.rows.tensors,
            torch.from_numpy(np.array(lengths, dtype=np.int64)),
            source=None if is_own else torch.from_numpy(np.array(source, dtype=np.int64)),
            rows=rows,
            penalties=penalties,
            biases=biases,
            masks=masks,
            drawn=drawn,
        )


def question_of(row: int, token_id: int, context: RowContext) -> Question | None:
    """What a row that samples from logits row `row` wants told beside the id it has drawn."""
    params = context.params
    if params.beam is not None:
        return Question(row, 0, num_candidates(params, context.eos_token_ids))
    if params.logprobs is None:
        return None
    return Question(row, token_id, params.logprobs, params.logprob_token_ids)


def _answers(logits: Tensor, asked: Mapping[int, Question | None]) -> dict[int, Answer]:
    questions = {i: question for i, question in asked.items() if question is not None}
    return dict(zip(questions, answers(logits, list(questions.values())), strict=True))


def tell(outputs: list[RowOutput], told: Mapping[int, Answer], contexts: Mapping[int, RowContext]) -> None:
    """Put what was asked into the outputs; a beam search's row has no token of its own, only its candidates."""
    for i, (logprob, top) in told.items():
        if contexts[i].params.beam is not None:
            outputs[i] = RowOutput(top_logprobs=(top,))
        else:
            outputs[i] = RowOutput(outputs[i].token_ids, (logprob,), (top,))


def tells_drawn(params: SamplingParams) -> bool:
    """Whether its logprobs are of the distribution that the token was drawn from."""
    return params.logprobs_mode == "processed" and params.logprobs is not None and params.beam is None
