"""Which tokens a row's grammar lets follow, as a mask over the vocabulary.

A row's state follows from its output tokens alone: it is built when the row first samples and caught up with the
tokens it has not seen, so that preemption and forks have nothing to hand on. Until the thinking ends (if there is
any) the grammar sleeps; the end is found in the bytes of the output, however the mark is cut into tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine import ops
from engine.batch import RowOutput
from engine.grammar_complaints import fault_of_the_grammar
from engine.sampling.logits import RowContext
from engine.sampling_params import ReasoningMarks, SamplingParams
from engine.structured import GrammarStore

logger = logging.getLogger("pagemill.engine")

GRAMMAR_FAILED = RowOutput(error="The grammar of this request failed while its text was made.")
BITS = 32  # per word of a mask
MAX_LOGGED = 300  # characters of a complaint
Int64s = npt.NDArray[np.int64]
MAX_GAP = 2  # tokens of line breaks between the thinking and the form


class Phase(Enum):
    OPEN = "open"  # the output may still begin with the mark that starts the thinking
    THINKING = "thinking"
    GAP = "gap"  # the thinking has just ended: line breaks may follow, as models write them
    GRAMMAR = "grammar"


class GrammarRow:
    """One sequence's place in its grammar."""

    __slots__ = (
        "_bytes_seen",
        "_marks",
        "_new_matcher",
        "_num_gap",
        "_store",
        "matcher",
        "num_seen",
        "phase",
    )

    def __init__(self, store: GrammarStore, params: SamplingParams) -> None:
        """Raises LookupError if the grammar is not there."""
        assert params.structured is not None
        self._store = store
        self._new_matcher = partial(store.matcher, params.structured)
        self._marks: ReasoningMarks | None = params.reasoning
        self._bytes_seen = b""  # while OPEN all, while THINKING as many as may begin the mark
        self.num_seen = 0  # output tokens
        self._num_gap = 0
        self.matcher: Any = self._new_matcher()  # None: the output can only be thinking
        if self._marks is None:
            self.phase = Phase.GRAMMAR
        else:
            self.phase = Phase.THINKING if self._marks.opened else Phase.OPEN

    @property
    def allowed_beside(self) -> list[int]:
        """Ids that may follow whatever the grammar says: on the way to a mark, or behind one."""
        if self.phase is Phase.OPEN:
            assert self._marks is not None
            return self._store.tokens_towards(self._marks.start.encode()[len(self._bytes_seen) :])
        return self._store.line_breaks if self.phase is Phase.GAP else []

    @property
    def ended(self) -> bool:
        """The text is complete and nothing can follow."""
        return self.phase is Phase.GRAMMAR and bool(self.matcher.is_stopped()) and not self.matcher.is_error()

    @property
    def failed(self) -> bool:
        return self.matcher is not None and bool(self.matcher.is_error())

    def take(self, token_id: int) -> None:
        """One more output token. What a step that was on its way drew behind the end of the text is nothing."""
        self.num_seen += 1
        if self.ended:
            return
        if self.phase is Phase.GRAMMAR:
            self.matcher.consume_token(token_id)
        elif self.phase is Phase.THINKING:
            self._think(self._store.token_bytes(token_id))
        elif self.phase is Phase.GAP:
            self._cross(token_id)
        else:
            self._open(token_id)

    def _open(self, token_id: int) -> None:
        """Mark and grammar are followed side by side until one of them is ruled out."""
        assert self._marks is not None
        start = self._marks.start.encode()
        self._bytes_seen += self._store.token_bytes(token_id)
        if self._bytes_seen.startswith(start):
            self.phase, rest = Phase.THINKING, self._bytes_seen[len(start) :]
            self._bytes_seen = b""
            self.matcher = self._new_matcher()
            self._think(rest)
            return
        if self.matcher is not None and self.matcher.try_consume_tokens([token_id]) == 0:
            self.matcher = None
        if not start.startswith(self._bytes_seen):
            self.phase = Phase.GRAMMAR
            if self.matcher is None:  # neither: this cannot be sampled, but a preempted text need not be ours
                self.matcher = self._new_matcher()
                self.matcher.consume_token(token_id)

    def _think(self, data: bytes) -> None:
        assert self._marks is not None
        end = self._marks.end.encode()
        seen = self._bytes_seen + data
        found = seen.find(end)
        if found < 0:
            self._bytes_seen = seen[max(0, len(seen) - len(end) + 1) :]
            return
        rest = seen[found + len(end) :]
        text = rest.lstrip()  # blanks behind the mark belong to it
        self.phase = Phase.GRAMMAR if rest else Phase.GAP
        if text:
            self.matcher.consume_tokens(self._store.spell(text))

    def _cross(self, token_id: int) -> None:
        self._num_gap += 1
        taken = self.matcher.try_consume_tokens([token_id]) == 1
        if not taken and token_id not in self._store.line_breaks:
            self.matcher.consume_token(token_id)  # not ours to sample; the matcher says what is wrong
            taken = True
        if taken or self._num_gap == MAX_GAP:
            self.phase = Phase.GRAMMAR


@dataclass(frozen=True, slots=True)
class Told:
    """masks: rows of a step whose grammar is awake have one. banned: ids, by row of the step. failed: by row, the end
    of each whose grammar failed."""

    masks: ops.Masks | None = None
    banned: Mapping[int, Sequence[int]] = field(default_factory=dict)
    failed: Mapping[int, RowOutput] = field(default_factory=dict)


class GrammarRows:
    """The grammar rows among all rows of a runner. Memory for masks is taken with the first grammar.

    store None: no row can have a grammar."""

    def __init__(self, num_rows: int, store: GrammarStore | None) -> None:
        self._store = store
        self._rows: list[GrammarRow | None] = [None] * num_rows
        self._masks: np.ndarray[Any, np.dtype[np.int32]] | None = None  # [num_rows, words]
        self._executor: Any = None  # llguidance's, which comes with the second row

    def clear(self, row: int) -> None:
        """The row is free, or another sequence has it from now on."""
        self._rows[row] = None

    def mask(self, rows: Sequence[int] | Int64s, contexts: Mapping[int, RowContext], vocab_size: int) -> Told:
        """What the grammars among `contexts` say. rows: [n], of the step; contexts: by index into rows; vocab_size:
        ids that may be sampled."""
        asking = [i for i, context in contexts.items() if context.params.structured is not None]
        if not asking:
            return Told()
        states = {i: state for i in asking if (state := self._caught_up(int(rows[i]), contexts[i])) is not None}
        self._compute(states)
        failed = {i: GRAMMAR_FAILED for i in asking if i not in states}
        banned: dict[int, Sequence[int]] = {}
        of = np.full(len(rows), -1, dtype=np.int64)
        for i, state in states.items():
            if state.ended:  # the step was on its way when the end was drawn: nobody wants its token
                continue
            if state.failed:
                failed[i] = self._end_of(state, contexts[i].params)
            elif state.phase is Phase.THINKING:  # an end here would leave the form empty
                assert self._store is not None
                banned[i] = self._store.eos_token_ids
            else:
                self._complete(self._mask_table()[i].view(np.uint32), state, contexts[i].params, vocab_size)
                of[i] = i
        masks = None
        if (of >= 0).any():
            masks = ops.Masks(torch.from_numpy(self._mask_table()), torch.from_numpy(of))
        return Told(masks, banned, failed)

    def _end_of(self, state: GrammarRow, params: SamplingParams) -> RowOutput:
        """Of a row whose matcher gave up: the client's grammar is at fault where it met a limit or a dead end."""
        assert self._store is not None
        assert params.structured is not None
        complaint = str(state.matcher.get_error())
        self._store.spend(params.structured)
        told = fault_of_the_grammar(complaint)
        if told is None:
            logger.error("a grammar failed: %s", complaint[:MAX_LOGGED])
            return GRAMMAR_FAILED
        logger.debug("a grammar failed: %s", complaint[:MAX_LOGGED])
        param = params.structured.param
        return RowOutput(error=f"{param} failed while its text was made: {told}", error_param=param)

    def take(self, row: int, token_ids: Sequence[int]) -> bool:
        """The row's next tokens were drawn; True if they complete the text."""
        state = self._rows[row]
        if state is None or not token_ids:
            return False
        for token_id in token_ids:
            state.take(token_id)
        return state.ended

    def _caught_up(self, row: int, context: RowContext) -> GrammarRow | None:
        """None if the grammar is gone: nobody waits for the text any more."""
        output = context.token_ids[context.num_prompt_tokens :]
        state = self._rows[row]
        try:
            if state is None or state.num_seen > len(output):
                assert self._store is not None
                state = self._rows[row] = GrammarRow(self._store, context.params)
        except LookupError as error:
            logger.debug("a row has no grammar: %s", error)
            return None
        for token_id in output[state.num_seen :].tolist():
            state.take(token_id)
        return state

    def _compute(self, states: dict[int, GrammarRow]) -> None:
        """The masks of all rows whose grammar is awake, with the interpreter lock released."""
        awake = [
            (s.matcher, i)
            for i, s in states.items()
            if s.phase is not Phase.THINKING and s.matcher is not None and not s.ended
        ]
        if not awake:
            return
        masks = self._mask_table()
        num_bytes = masks.shape[1] * masks.itemsize
        if len(awake) == 1:
            ((matcher, index),) = awake
            matcher.unsafe_compute_mask_ptr(masks[index].ctypes.data, num_bytes)
            return
        if self._executor is None:
            from llguidance import LLExecutor

            self._executor = LLExecutor(num_threads=torch.get_num_threads())
        self._executor.unsafe_compute_mask_ptr(awake, masks.ctypes.data, num_bytes, len(masks))

    def _mask_table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        if self._masks is None:
            assert self._store is not None
            words = -(-self._store.mask_size // BITS)
            self._masks = np.zeros((len(self._rows), words), dtype=np.int32)
        return self._masks

    def _complete(
        self, mask: npt.NDArray[np.uint32], state: GrammarRow, params: SamplingParams, vocab_size: int
    ) -> None:
        """Change the mask, [words], by what a grammar does not know."""
        assert self._store is not None
        if state.matcher is None:
            mask.fill(0)
        if beside := state.allowed_beside:
            ids = np.array(beside)
            np.bitwise_or.at(mask, ids // BITS, _bits(ids))
        eos = np.array(self._store.eos_token_ids, dtype=np.int64)
        if params.ignore_eos and _num_allowed(mask, vocab_size) > len(eos):
            np.bitwise_and.at(mask, eos // BITS, ~_bits(eos))


def _bits(ids: Int64s) -> npt.NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (ids % BITS).astype(np.uint32))


def _num_allowed(mask: npt.NDArray[np.uint32], vocab_size: int) -> int:
    return int(np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].sum())
