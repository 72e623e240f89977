"""An engine without a model: says what a script tells it to, in random pieces, through the real GenerationStream.

Also a small real tokenizer: byte-level BPE with a few merges, ChatML control tokens and template.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from engine.outputs import (
    Delivery,
    FinishReason,
    ModelInfo,
    NotServing,
    Phase,
    PromptLogprobs,
    RequestTimedOut,
    SamplingDefaults,
    SequenceOutput,
    TokenLogprobs,
)
from engine.progress import Progress
from engine.sampling_params import InvalidParameter, SamplingParams, StructuredOutput
from engine.stream import GenerationStream
from engine.terms import NO_TERMS, Terms
from engine.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BOS, IM_START, IM_END = "<s>", "<|im_start|>", "<|im_end|>"
MERGES = [
    ("t", "h"),
    ("th", "e"),
    ("Ġ", "the"),
    ("i", "n"),
    ("e", "r"),
    ("Ġ", "a"),
    ("h", "e"),
    ("l", "l"),
    ("ð", "Ł"),
]


def small_tokenizer(
    *, adds_bos: bool = False, chat_template: str | None = CHATML, more_special: Sequence[str] = ()
) -> Tokenizer:
    """Ids 0-255 are bytes, then merges, then <s>, <|im_start|>, <|im_end|> (the end of a text)."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in MERGES]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in (BOS, IM_START, IM_END, *more_special)]
    )
    if adds_bos:
        backend.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, len(vocab))])
    return Tokenizer(
        backend,
        bos_token_id=len(vocab),
        eos_token_ids=(len(vocab) + 2,),
        chat_templates={"default": chat_template} if chat_template else {},
        special_tokens={"bos_token": BOS, "eos_token": IM_END},
    )


@dataclass(frozen=True)
class Admitted:
    """One call of generate."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    cache_salt: str
    label: str
    terms: Terms = NO_TERMS
    adapter: str = ""


# (prompt token ids, prompt index, choice index) -> token ids the model "samples", before any limit
Script = Callable[[Sequence[int], int, int], Sequence[int]]


class FakeEngine:
    """Implements server.engine_port.Engine.

    script: what is said. splits: how deliveries are cut, None for one token per delivery. pause_s: between
    deliveries. Public lists tell what happened: `admitted`, `finished` (by the reader), `closed` (stream ids)."""

    def __init__(
        self,
        script: Script,
        *,
        tokenizer: Tokenizer | None = None,
        max_model_len: int = 512,
        defaults: SamplingDefaults | None = None,
        splits: random.Random | None = None,
        pause_s: float = 0.0,
    ) -> None:
        self.script = script
        self.tokenizer = tokenizer or small_tokenizer()
        self.splits = splits
        self.pause_s = pause_s
        self.phase = Phase.READY
        self.hung = False
        self.progress = Progress()
        self.refusal: Exception | None = None
        self.logprob_of: Callable[[int], float] = lambda choice: -0.5  # of a choice's tokens
        self.fail_after: int | None = None  # deliveries, then every sequence ends with an error
        self.fault_of: str | None = None  # the field that is then to blame
        self.fails_with: FinishReason = "error"
        self.admitted: list[Admitted] = []
        self.compiled: list[StructuredOutput] = []
        self.finished: list[tuple[int, int]] = []
        self.closed: list[int] = []
        self.num_delivered_tokens = 0
        self.num_resets = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._listeners: list[Callable[[Delivery], None]] = []
        self.model_info = ModelInfo(
            name="fake-model",
            source="nowhere",
            architecture="fake",
            max_model_len=max_model_len,
            vocab_size=self.tokenizer.vocab_size,
            eos_token_ids=self.tokenizer.eos_token_ids,
            dtype="float32",
            num_parameters=1,
            num_blocks=64,
            block_size=16,
            kv_bytes_per_token=1,
            num_threads=1,
            hidden_size=4,
            system_fingerprint="fp_fake",
            sampling_defaults=defaults or SamplingDefaults(),
        )

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def wait_dead(self) -> None:
        await asyncio.Event().wait()

    async def drain(self, grace_s: float) -> None:
        self.phase = Phase.DRAINING

    def add_listener(self, callback: Callable[[Delivery], None]) -> None:
        self._listeners.append(callback)

    def reset_prefix_cache(self) -> None:
        if self.phase is not Phase.READY:
            raise NotServing("The engine is not serving.")
        self.num_resets += 1

    def paint(self) -> None: ...

    async def compile(self, structured: StructuredOutput, client: str = "") -> bool:
        """Refuses what has "bad" in its source; no text is held to a form."""
        known = structured in self.compiled
        self.compiled.append(structured)
        if "bad" in structured.source:
            raise InvalidParameter(structured.param, f"{structured.param} is bad.")
        return known

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        label: str = "",
        terms: Terms = NO_TERMS,
        adapter: str = "",
    ) -> GenerationStream:
        if self.refusal is not None:
            raise self.refusal
        if self.phase is not Phase.READY:
            raise NotServing("The engine is not serving.")
        if terms.deadline_s is not None and terms.deadline_s <= time.monotonic():
            raise RequestTimedOut
        params.check_vocabulary(self.model_info.vocab_size)
        for prompt in prompts:
            if (
                not prompt
                or len(prompt) + (1 if params.max_tokens is None else params.max_tokens)
                > self.model_info.max_model_len
            ):
                raise InvalidParameter("prompt", "The prompt has a bad length.")
        self.admitted.append(Admitted(tuple(map(tuple, prompts)), params, cache_salt, label, terms, adapter))
        stream = GenerationStream(
            len(self.admitted), {i: len(p) for i, p in enumerate(prompts)}, params.n, on_abort=self._on_abort
        )
        task = asyncio.get_running_loop().create_task(self._run(stream, prompts, params))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    def _on_abort(self, stream: GenerationStream, key: tuple[int, int] | None) -> None:
        if key is None:
            self.closed.append(stream.stream_id)
        else:
            self.finished.append(key)

    async def _embed(self, stream: GenerationStream, prompts: Sequence[Sequence[int]]) -> None:
        """[number of tokens, first, last, -1] of each prompt, the last prompt first."""
        for index in reversed(range(len(prompts))):
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            if self.fail_after is not None and len(prompts) - index > self.fail_after:
                stream.fail("secret detail of the inside", self.fails_with)
                return
            prompt = prompts[index]
            vector = struct.pack("<4f", len(prompt), prompt[0], prompt[-1], -1.0)
            stream.put((SequenceOutput(index, 0, finish_reason="length", embedding=vector, num_cached_tokens=2),))

    async def _run(self, stream: GenerationStream, prompts: Sequence[Sequence[int]], params: SamplingParams) -> None:
        if params.pooling is not None:
            await self._embed(stream, prompts)
            return
        left = {
            (p, c): list(self._sequence(prompt, params, p, c))
            for p, prompt in enumerate(prompts)
            for c in range(params.n)
        }
        deliveries = 0
        if params.prompt_logprobs is not None:
            for p, prompt in enumerate(prompts):
                for chunk in _scores(prompt, params.prompt_logprobs):
                    stream.put((SequenceOutput(p, 0, prompt_logprobs=(chunk,)),))
                    await asyncio.sleep(0)
        while left and not stream.ended:
            if self.fail_after is not None and deliveries >= self.fail_after:
                if self.fault_of is None:
                    stream.fail("secret detail of the inside", self.fails_with)
                    return
                told = f"{self.fault_of} failed: it is too complex."
                ends = [SequenceOutput(*k, finish_reason="error", error=told, error_param=self.fault_of) for k in left]
                stream.put(tuple(ends))
                return
            keys = [key for key in left if self.splits is None or self.splits.random() < 0.7]
            outputs = [self._output(key, left, params) for key in keys]
            stream.put(tuple(outputs))
            deliveries += 1
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            elif self.splits is None or self.splits.random() < 0.6:
                await asyncio.sleep(0)

    def _sequence(self, prompt: Sequence[int], params: SamplingParams, p: int, c: int) -> list[int]:
        """The scripted tokens, cut by max_tokens, end of text and stop tokens; each with how it ends."""
        limit = self.model_info.max_model_len - len(prompt) if params.max_tokens is None else params.max_tokens
        if limit == 0:
            return []
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.tokenizer.eos_token_ids))
        said: list[int] = []
        for token_id in self.script(prompt, p, c):
            said.append(token_id)
            if len(said) == limit or (token_id in ends and len(said) > params.min_tokens):
                break
        return said

    def _output(
        self, key: tuple[int, int], left: dict[tuple[int, int], list[int]], params: SamplingParams
    ) -> SequenceOutput:
        count = 1 if self.splits is None else self.splits.randint(1, 4)
        taken, rest = left[key][:count], left[key][count:]
        self.num_delivered_tokens += len(taken)
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.tokenizer.eos_token_ids))
        by_token = bool(taken) and not rest and taken[-1] in ends
        left[key] = rest
        if not rest:
            del left[key]
        top = None
        if params.logprobs is not None:
            top = tuple(
                TokenLogprobs((t, 65, 66)[: params.logprobs], (-0.5, -1.5, -2.5)[: params.logprobs]) for t in taken
            )
        return SequenceOutput(
            *key,
            token_ids=tuple(taken),
            logprobs=(self.logprob_of(key[1]),) * len(taken),
            top_logprobs=top,
            finish_reason=None if rest else ("stop" if by_token else "length"),
            stop_token_id=taken[-1] if by_token else None,
            num_cached_tokens=2,
        )


def _scores(prompt: Sequence[int], num_top: int) -> Iterator[PromptLogprobs]:
    """Token i has the logprob -i and the rank i; its alternatives are the ids before its own. In chunks of three."""
    places = range(1, len(prompt))
    for start in range(0, len(places), 3):
        part = places[start : start + 3]
        yield PromptLogprobs(
            num_top,
            array("f", [-float(i) for i in part]),
            array("i", part),
            array("i", [max(prompt[i] - k, 0) for i in part for k in range(1, num_top + 1)]),
            array("f", [-float(i) - k for i in part for k in range(1, num_top + 1)]),
        )


def says(text: str, tokenizer: Tokenizer, *, end: bool = True) -> Script:
    """The same text for every choice, byte by byte, then the end of the text."""
    token_ids = [token_id for char in text for token_id in tokenizer.encode(char, add_special_tokens=False)]
    ending = [tokenizer.eos_token_ids[0]] if end else []
    return lambda prompt, p, c: token_ids + ending
