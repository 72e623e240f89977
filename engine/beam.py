"""Beam search as such: which hypotheses go on after a step, which are finished, when nothing better can come.

Knows tokens and logprobs; knows no rows, blocks or queues. The rules are those of transformers' beam search
(generation/utils.py), so that both find the same texts:
- a step's continuations are ranked by the sum of their logprobs over all running hypotheses; ties go to the better
  hypothesis, then to the likelier token;
- a continuation that ends (a stop token, or the length limit) is finished if it ranks among the first `width`, with
  the score sum / length ** length_penalty; the best `width` finished ones are kept;
- the first `width` that do not end go on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import nlargest

from engine.outputs import FinishReason, TokenLogprobs
from engine.sampling_params import BeamSearch, SamplingParams


def num_candidates(params: SamplingParams, eos_token_ids: Sequence[int]) -> int:
    """Best next tokens of a hypothesis that the search looks at: as many as may go on, and all that may end it."""
    assert params.beam is not None
    stops = {*eos_token_ids, *params.stop_token_ids}
    return max(params.beam.width + len(stops), params.logprobs or 0)


def num_blocks_needed(beam: BeamSearch, num_prompt_tokens: int, max_tokens: int, block_size: int) -> int:
    """Blocks that a search takes at most: the prompt's full ones once, all others for each hypothesis."""
    shared = num_prompt_tokens // block_size
    whole = -(-(num_prompt_tokens + max_tokens - 1) // block_size)
    return shared + beam.width * (whole - shared)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Output tokens so far. total: the sum of their logprobs. alternatives: per token, where they were asked for."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    alternatives: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    hypothesis: Hypothesis
    score: float
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Continuation:
    """One more token for running[parent]."""

    parent: int
    token_id: int
    logprob: float
    total: float


class Search:
    """One prompt's. running: the hypotheses that go on, best first; it begins with one of no tokens."""

    def __init__(self, params: SamplingParams, stop_ids: frozenset[int], max_output_tokens: int) -> None:
        assert params.beam is not None
        self.running: list[Hypothesis] = [Hypothesis()]
        self.finished: list[Finished] = []  # at most width, best first
        self._beam = params.beam
        self._stop_ids = stop_ids
        self._min_tokens = params.min_tokens
        self._max_tokens = max_output_tokens
        self._num_told = params.logprobs  # alternatives per token
        self._length = 0  # output tokens of every running hypothesis

    def advance(self, candidates: Sequence[TokenLogprobs]) -> list[Continuation]:
        """candidates: for each running hypothesis its `num_candidates` best next tokens.

        What goes on, in the order of the new `running`; empty when the search is over."""
        ranked = self._ranked(candidates)
        self._length += 1
        self._finish(ranked[: self._beam.width], candidates)
        going = [each for each in ranked if self._reason(each.token_id) is None][: self._beam.width]
        if not going or self._is_over(going[0].total):
            return []
        self.running = [self._extended(each, candidates) for each in going]
        return going

    def results(self, count: int) -> list[Finished]:
        """The best `count`, best first; once the search is over there are that many, up to width."""
        return self.finished[:count]

    def _ranked(self, candidates: Sequence[TokenLogprobs]) -> list[Continuation]:
        masked = self._stop_ids if self._length < self._min_tokens else frozenset()
        found = [
            Continuation(parent, token_id, logprob, hypothesis.total + logprob)
            for parent, (hypothesis, each) in enumerate(zip(self.running, candidates, strict=True))
            for token_id, logprob in zip(each.token_ids, each.logprobs, strict=True)
            if token_id not in masked
        ]
        return sorted(found, key=lambda each: -each.total)

    def _reason(self, token_id: int) -> FinishReason | None:
        """Why a hypothesis ends with this token, being self._length long."""
        if token_id in self._stop_ids:
            return "stop"
        return "length" if self._length >= self._max_tokens else None

    def _finish(self, best: Sequence[Continuation], candidates: Sequence[TokenLogprobs]) -> None:
        divisor = self._divisor(self._length)
        for each in best:
            reason = self._reason(each.token_id)
            if reason is not None:
                self.finished.append(Finished(self._extended(each, candidates), each.total / divisor, reason))
        self.finished = nlargest(self._beam.width, self.finished, key=lambda each: each.score)

    def _is_over(self, best_running: float) -> bool:
        """True if no running hypothesis may beat the worst that is kept."""
        beam = self._beam
        if len(self.finished) < beam.width:
            return False
        if beam.early_stopping is True:
            return True
        at_best = self._max_tokens if beam.early_stopping == "never" and beam.length_penalty > 0 else self._length
        return best_running / self._divisor(at_best) <= self.finished[-1].score

    def _divisor(self, length: int) -> float:
        return math.pow(length, self._beam.length_penalty)

    def _extended(self, each: Continuation, candidates: Sequence[TokenLogprobs]) -> Hypothesis:
        parent = self.running[each.parent]
        told = parent.alternatives
        if (count := self._num_told) is not None:
            best = candidates[each.parent]
            told = (*told, TokenLogprobs(best.token_ids[:count], best.logprobs[:count]))
        return Hypothesis((*parent.token_ids, each.token_id), (*parent.logprobs, each.logprob), told, each.total)
