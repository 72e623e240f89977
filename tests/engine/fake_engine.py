"""Scheduler and fake runner as a loop drives them, at any pipeline depth, with every invariant checked on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.batch import ScheduledBatch
from engine.config import SchedulerConfig
from engine.kv.manager import KVCacheManager
from engine.outputs import SequenceOutput
from engine.sampling.philox import seed_key
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Request
from engine.stats import RequestStats
from engine.step import Changes
from engine.terms import NO_TERMS, Terms
from tests.engine.fake_runner import EOS, FakeHandle, FakeRunner, solo, solo_search

Key = tuple[int, int, int]  # stream, prompt, choice


@dataclass
class Text:
    """What the outside has seen of one sequence."""

    token_ids: list[int] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)
    finish_reason: str | None = None


class FakeEngine:
    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        budget: int = 64,
        chunk: int = 32,
        depth: int = 1,
        prefix_caching: bool = True,
        num_groups: int = 1,
        fails: Callable[[ScheduledBatch, int], bool] = lambda batch, index: False,
    ) -> None:
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=chunk, pipeline_depth=depth
        )
        manager = KVCacheManager(num_blocks, block_size, enable_prefix_caching=prefix_caching, num_groups=num_groups)
        self.scheduler = Scheduler(config, manager, max_model_len)
        self.runner = FakeRunner(block_size, fails)
        self.max_model_len = max_model_len
        self.depth = depth
        self.now = 0.0
        self.requests: dict[tuple[int, int], tuple[Request, int]] = {}  # (stream, prompt) -> request, seed
        self.texts: dict[Key, Text] = {}
        self.scores: dict[tuple[int, int], list[tuple[float, int]]] = {}  # of prompt tokens: logprob and rank
        self.finished: list[RequestStats] = []
        self.batches: list[ScheduledBatch] = []
        self._in_flight: deque[tuple[ScheduledBatch, FakeHandle]] = deque()

    def add(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        stream: int | None = None,
        index: int = 0,
        seed: int = 0,
        salt: str = "",
        adapter: tuple[str, int] = ("", 0),
        terms: Terms = NO_TERMS,
    ) -> int:
        """Queue one prompt; returns its stream id."""
        stream = len(self.requests) if stream is None else stream
        params = params or SamplingParams(max_tokens=8)
        request = Request(
            stream,
            index,
            prompt,
            params,
            seed=seed,
            eos_token_ids=(EOS,),
            cache_salt=salt,
            adapter=adapter[0],
            adapter_index=adapter[1],
            arrival_s=self.now,
            terms=terms,
        )
        self.requests[stream, index] = request, seed
        self.texts.update({(stream, index, choice): Text() for choice in range(params.n)})
        self.scheduler.add(request)
        return stream

    def abort(self, stream: int, index: int | None = None, choice: int | None = None) -> None:
        self._take(self.scheduler.abort(stream, index, choice, now=self.now))
        self.scheduler.check()

    def step(self) -> bool:
        """One turn of the loop; False when there was nothing to do."""
        self.now += 1.0
        batch = self.scheduler.schedule(self.now)
        self.scheduler.check()
        if batch is not None:
            self.batches.append(batch)
            self._in_flight.append((batch, self.runner.launch(batch)))
        elif not self._in_flight:
            return False
        if batch is None or len(self._in_flight) >= self.depth:
            oldest, handle = self._in_flight.popleft()
            self._take(self.scheduler.update(oldest, handle.result(), self.now))
            self.scheduler.check()
        return True

    def fail_step(self) -> None:
        """Schedule a step that never reaches the runner."""
        self.now += 1.0
        batch = self.scheduler.schedule(self.now)
        if batch is not None:
            self.runner.lost_a_step = True
            self._take(self.scheduler.fail_step(batch, "broken", self.now))
            self.scheduler.check()

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is left; nothing may leak, every sequence must have ended."""
        for _ in range(max_steps):
            if not self.step():
                break
        else:
            raise AssertionError("no end in sight: livelock")
        assert not self.scheduler.has_work
        assert all(text.finish_reason for text in self.texts.values())
        assert len(self.finished) == len(self.texts)

    def expected(self, key: Key) -> tuple[list[int], str]:
        stream, index, choice = key
        request, seed = self.requests[stream, index]
        prompt = request.sequences[choice].token_ids[: request.sequences[choice].num_prompt_tokens]
        if request.params.beam is not None:
            return solo_search(prompt, request.params, self.max_model_len, (EOS,))[choice]
        return solo(prompt, request.params, seed_key(seed, index, choice), self.max_model_len, (EOS,))

    def verify(self) -> None:
        """Every text is its solo text; a sequence that was ended early has a beginning of it."""
        for key, text in self.texts.items():
            tokens, reason = self.expected(key)
            if text.finish_reason in ("abort", "error"):
                assert text.token_ids == tokens[: len(text.token_ids)]
            else:
                assert (text.token_ids, text.finish_reason) == (tokens, reason)
        for (stream, index), (request, _) in self.requests.items():
            wanted = []
            if request.params.prompt_logprobs is not None:
                prompt = request.sequences[0].token_ids[: request.sequences[0].num_prompt_tokens]
                wanted = [(-float(i), token) for i, token in enumerate(prompt[1:], start=1)]
            got = self.scores.get((stream, index), [])
            ends = {self.texts[stream, index, choice].finish_reason for choice in range(request.params.n)}
            assert got == (wanted if ends <= {"stop", "length"} else wanted[: len(got)])

    def _take(self, changes: Changes) -> None:
        self.finished += changes.finished
        for stream, outputs in changes.outputs:
            for output in outputs:
                text = self.texts[stream, output.prompt_index, output.choice_index]
                assert text.finish_reason is None, "nothing follows a finish_reason"
                text.token_ids += output.token_ids
                text.outputs.append(output)
                for chunk in output.prompt_logprobs:
                    told = zip(chunk.logprobs, chunk.ranks, strict=True)
                    self.scores.setdefault((stream, output.prompt_index), []).extend(told)
                text.finish_reason = output.finish_reason
