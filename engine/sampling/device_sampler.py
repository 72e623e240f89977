"""Logits to token ids on a device: `Sampler`'s results, issued before the host knows what the last step drew.

A step's draw is staged (what the host knows goes up with the step's upload), run (the device edits, draws, stores the
tokens and counts them), and read when it has come back. Order per row as in sampler.py. Only a row with a grammar
needs more: its mask follows from the row's tokens, so the steps before it are read first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine import device_ops, ops
from engine.batch import NewRow, RowOutput
from engine.device_rows import DeviceRows, Int64s
from engine.sampling.device_edits import PenaltyCounts, StagedBiases, StagedMasks, StagedPenalties
from engine.sampling.drawn import drawn_from
from engine.sampling.grammar import GrammarRows
from engine.sampling.logits import RowContext
from engine.sampling.logprobs import Answer, Question, answers_from, ids_asked
from engine.sampling.sampler import ERRORS, SamplingRows, question_of, tell, tells_drawn
from engine.step_buffers import Download, Fetched, Staged, Upload
from engine.structured import GrammarStore


class DeviceSampler:
    """vocab_size: ids that may be sampled; logits rows beyond it (padding of the weights) are banned."""

    def __init__(
        self, num_rows: int, vocab_size: int, device: torch.device, grammars: GrammarStore | None = None
    ) -> None:
        self.rows = SamplingRows(num_rows)
        self.grammars = GrammarRows(num_rows, grammars)
        self.counts = PenaltyCounts(num_rows, vocab_size, device)
        self.vocab_size = vocab_size
        self._is_unusable = np.zeros(num_rows, dtype=np.bool_)  # names ids that the kernels would not check

    def set(self, new: NewRow) -> None:
        """A sequence takes the row."""
        self.rows.set(new.row, new.params, new.seed_key, new.eos_token_ids)
        self.grammars.clear(new.row)
        self._is_unusable[new.row] = self.rows.is_special[new.row] and not self._knows_ids_of(new)

    def _knows_ids_of(self, new: NewRow) -> bool:
        params = new.params
        ids = [*(i for i, _ in params.logit_bias), *params.logprob_token_ids]
        if params.min_tokens > 0:
            ids += [*new.eos_token_ids, *params.stop_token_ids]
        if params.has_penalties:
            ids += new.token_ids
        return not ids or (min(ids) >= 0 and max(ids) < self.vocab_size)

    def rows_with_grammars(self, rows: Int64s) -> list[int]:
        """Those of the rows that cannot be staged before the host knows all of their tokens."""
        special = [row for row in rows.tolist() if self.rows.is_special[row]]
        return [row for row in special if self.rows.of(row).structured is not None]

    def stage(self, source: Int64s, rows: Int64s, lengths: Int64s, table: DeviceRows, upload: Upload) -> Draw:
        """source: [n], the logits row that each row samples from; rows: [n]; lengths: [n], tokens of each row, the new
        one goes to this position."""
        contexts = {}
        failed = {}
        for i, row in enumerate(rows.tolist()):
            if not self.rows.is_special[row]:
                continue
            if self._is_unusable[row]:
                failed[i] = ERRORS[-2]
                continue
            tokens, num_prompt = table.known_ids[row, : lengths[i]], int(table.num_prompt_tokens[row])
            contexts[i] = RowContext(self.rows.of(row), tokens, num_prompt, self.rows.eos_token_ids[row])
        return Draw(self, source, rows, lengths, table, contexts, failed, upload)


class Draw:
    """One step's. contexts: of the special rows, by row of the step in ascending order; failed: rows that draw for
    nothing."""

    def __init__(
        self,
        sampler: DeviceSampler,
        source: Int64s,
        rows: Int64s,
        lengths: Int64s,
        table: DeviceRows,
        contexts: dict[int, RowContext],
        failed: dict[int, RowOutput],
        upload: Upload,
    ) -> None:
        self._sampler, self._rows, self._lengths, self._table = sampler, rows, lengths, table
        self._contexts, self._failed = contexts, failed
        state = sampler.rows
        self._at = upload.add(rows)
        self._positions = upload.add(lengths)
        columns = (state.temperature, state.top_k, state.top_p, state.min_p, state.greedy)
        self._params = [upload.add(column[rows]) for column in columns]
        self._seed_keys = upload.add(state.seed_key[rows].view(np.int64))
        self._source: Staged | None = None
        if not np.array_equal(source, np.arange(len(source))):
            self._source = upload.add(source)
        self._penalties: StagedPenalties | None = None
        self._biases: StagedBiases | None = None
        self._masks: StagedMasks | None = None
        self._raw = self._processed = _Questions.none()
        if contexts:
            self._stage_special(source, upload)

    def _stage_special(self, source: Int64s, upload: Upload) -> None:
        sampler, contexts, rows = self._sampler, self._contexts, self._rows
        told = sampler.grammars.mask(rows, contexts, sampler.vocab_size)
        self._failed |= told.failed
        banned = {i: context.banned for i, context in contexts.items() if context.banned}
        banned |= {i: (*banned.get(i, ()), *ids) for i, ids in told.banned.items()}
        given = {i: bias for i in contexts if (bias := sampler.rows.bias[rows[i]]) is not None}
        self._penalties = StagedPenalties.of(contexts, len(rows), sampler.counts, upload)
        self._biases = StagedBiases.of(given, banned, upload)
        if told.masks is not None:
            masked = np.flatnonzero(told.masks.of.numpy() >= 0)
            words = told.masks.words.numpy()[told.masks.of.numpy()[masked]]
            self._masks = StagedMasks.of(words, masked, source[masked], upload)
        raw: dict[int, Question] = {}
        processed: dict[int, Question] = {}
        for i, context in contexts.items():
            question = question_of(int(source[i]), 0, context)
            if question is not None:
                (processed if tells_drawn(context.params) else raw)[i] = question
        self._raw, self._processed = _Questions.of(raw, upload), _Questions.of(processed, upload)

    def run(self, logits: Tensor, download: Download) -> None:
        """logits: [num_logits, vocab], float32; may be changed. The drawn tokens go into the rows, a failed row's is
        0."""
        raw = logits[:, : self._sampler.vocab_size]
        edited, source = raw, None if self._source is None else self._source.tensor
        if source is not None and (self._is_edited or self._processed):
            edited, source = raw.index_select(0, source), None
        elif self._is_edited and (self._masks is not None or self._raw):
            edited = raw.clone()
        self._edit(edited, raw)
        params = temperature, top_k, top_p, min_p, greedy = [item.tensor for item in self._params]
        seed_keys, positions = self._seed_keys.tensor, self._positions.tensor
        ids = ops.sample(edited, temperature, top_k, top_p, min_p, greedy, seed_keys, positions, source=source)
        device_ops.store_tokens(self._table.token_ids, self._at.tensor, positions, ids)
        if self._penalties is not None:
            device_ops.count_tokens(self._sampler.counts.tables[0], self._at.tensor, ids)
        self._ids = download.add(ids)
        if self._raw:
            self._raw.ask(raw, ids, download, self._raw.source.tensor)
        if self._processed:
            of = self._processed.rows.tensor
            drawn = drawn_from(edited.index_select(0, of), *(each.index_select(0, of) for each in params))
            self._processed.ask(drawn, ids, download)

    @property
    def _is_edited(self) -> bool:
        return self._penalties is not None or self._biases is not None or self._masks is not None

    def _edit(self, logits: Tensor, raw: Tensor) -> None:
        if self._penalties is not None:
            self._penalties.apply(logits, self._at.tensor)
        if self._biases is not None:
            self._biases.apply(logits)
        if self._masks is not None:
            self._masks.apply(logits, raw)

    def read(self) -> list[RowOutput]:
        """Once the download has arrived: as Sampler.sample. The host's tables learn the tokens."""
        outputs = [RowOutput((i,)) if i >= 0 else ERRORS[i] for i in self._ids.array.tolist()]
        for i, end in self._failed.items():
            outputs[i] = end
        sound = {i: context for i, context in self._contexts.items() if outputs[i].error is None}
        for questions in (self._raw, self._processed):
            tell(outputs, {i: each for i, each in questions.read().items() if i in sound}, sound)
        for i, context in sound.items():
            row = int(self._rows[i])
            if context.params.structured is not None and self._sampler.grammars.take(row, outputs[i].token_ids):
                outputs[i] = outputs[i]._replace(ends=True)
        drawn = [output.token_ids[0] if output.token_ids else 0 for output in outputs]
        self._table.known_ids[self._rows, self._lengths] = drawn
        return outputs


@dataclass(slots=True)
class _Questions:
    """What rows of one step want told of one distribution each; false if nothing is asked."""

    asked: Mapping[int, Question]  # by row of the step
    rows: Staged  # [k], int64: the same rows
    source: Staged  # [k], int64: their rows of logits
    ids: Staged  # [k, num_ids], int64: the first is the drawn one, once it is known
    told: tuple[Fetched, Fetched, Fetched] | None = None

    @staticmethod
    def none() -> _Questions:
        nothing = Staged(np.empty(0, dtype=np.int64))
        return _Questions({}, nothing, nothing, nothing)

    @staticmethod
    def of(asked: Mapping[int, Question], upload: Upload) -> _Questions:
        if not asked:
            return _Questions.none()
        questions: Sequence[Question] = list(asked.values())
        return _Questions(
            asked,
            upload.add(np.array(list(asked), dtype=np.int64)),
            upload.add(np.array([question.row for question in questions], dtype=np.int64)),
            upload.add(ids_asked(questions)),
        )

    def __bool__(self) -> bool:
        return bool(self.asked)

    def ask(self, logits: Tensor, drawn: Tensor, download: Download, source: Tensor | None = None) -> None:
        """logits: [k, vocab], or of any number of rows with their source. drawn: [n], int64, of the step's rows."""
        ids = self.ids.tensor
        ids[:, 0] = drawn.index_select(0, self.rows.tensor).clamp(min=0)  # nobody reads what is told of a failed row
        told = ops.logprobs_topn(logits, ids, max(q.count for q in self.asked.values()), source=source)
        self.told = download.add(told.logprobs), download.add(told.top_ids), download.add(told.top_logprobs)

    def read(self) -> dict[int, Answer]:
        """By row of the step, what is told of its token."""
        if self.told is None:
            return {}
        lists = [fetched.array.tolist() for fetched in self.told]
        return dict(zip(self.asked, answers_from(list(self.asked.values()), *lists), strict=True))
