"""Frozen, picklable values that cross from the engine thread to the event loop, and the errors of that door.

EngineError
+-- QueueFull      the bounded inbox has no room: try again later (429)
+-- NotServing     the engine is starting, draining or dead (503)
+-- RequestFailed  this request failed inside the engine; others go on (500)
    +-- RequestAtFault  ... of what it asked for, which could not be seen before (400)
    +-- RequestTimedOut  ... its time was over (408)
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from engine.stats import Picture, RequestStats, StepStats

FinishReason = Literal["stop", "length", "abort", "error", "timeout"]


class EngineError(Exception):
    """Base of what the engine tells a caller."""


class QueueFull(EngineError):
    """retry_after_s: a guess at when it is worth trying again."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NotServing(EngineError):
    pass


class RequestFailed(EngineError):
    pass


class RequestAtFault(RequestFailed):
    """`param` is the wire name of the field to blame."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class RequestTimedOut(RequestFailed):
    def __init__(self) -> None:
        super().__init__("The request took longer than it was given.")


class Phase(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class TokenLogprobs(NamedTuple):
    """Alternatives at one position, best first, then the ids that were asked for by name and are not among those.
    Natural logarithms; of which distribution, SamplingParams.logprobs_mode says."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Consecutive prompt tokens, each as the tokens before it foretell it. The prompt's first token has no entry.

    Flat arrays: a prompt of 2,000 tokens with 20 alternatives has 40,000 of them."""

    num_top: int  # alternatives per token
    logprobs: array[float]  # [num_tokens], float32: natural logarithms of the model's own distribution
    ranks: array[int]  # [num_tokens], int32: 1 for the most likely token
    top_ids: array[int]  # [num_tokens * num_top], int32: best first
    top_logprobs: array[float]  # [num_tokens * num_top], float32

    def top(self, index: int, count: int) -> TokenLogprobs:
        """The first `count` alternatives of entry `index`."""
        start = index * self.num_top
        end = start + min(count, self.num_top)
        return TokenLogprobs(tuple(self.top_ids[start:end]), tuple(self.top_logprobs[start:end]))


class SequenceOutput(NamedTuple):
    """What one sequence gained since its last output.

    token_ids: new output tokens, the one that ended it included.
    logprobs: of the chosen tokens, one per token id where the request asked for logprobs, else none.
    top_logprobs: one per token id where the request asked for alternatives, else None.
    finish_reason: set exactly once, on the last output of the sequence.
    error: why, where finish_reason is "error"; error_param: the request's field that is to blame, None if none is.
    stop_token_id: the end-of-sequence or stop token that ended it; it is the last of token_ids and not text.
    num_cached_tokens: prompt tokens found in the prefix cache (of the request's first sequence).
    prompt_logprobs: where the request asked for them, those of further prompt tokens, in order; only one sequence of
        a request brings them, and all before or with the first token of any.
    embedding: the pooled vector where the request asked for one: [hidden_size], float32, little endian.
    """

    prompt_index: int
    choice_index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_param: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    embedding: bytes | None = None


class Delivery(NamedTuple):
    """One hand-over per step: everything the event loop learns from it.

    outputs: per stream id, the outputs of its sequences. started: streams whose first sequences got a row, and when
    (time.monotonic); one may be named again. picture: where one was asked for."""

    outputs: tuple[tuple[int, tuple[SequenceOutput, ...]], ...] = ()
    step: StepStats | None = None
    finished: tuple[RequestStats, ...] = ()
    started: tuple[tuple[int, float], ...] = ()
    picture: Picture | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What the model's generation_config asks for; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about the loaded model that the front of the house needs."""

    name: str  # short default name to serve it under
    source: str  # folder, file or id it came from
    architecture: str
    max_model_len: int
    vocab_size: int  # token ids that may be sent: [0, vocab_size)
    eos_token_ids: tuple[int, ...]
    dtype: str
    num_parameters: int
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    num_threads: int
    hidden_size: int = 0  # of an embedding
    quantization: str = "none"  # what linear layers' weights are held in: int8, int4, int4+int8
    numeric_profile: dict[str, str] = field(default_factory=dict)  # spelled out; hashed into system_fingerprint
    system_fingerprint: str = ""
    batch_invariant: bool = True
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    load_seconds: dict[str, float] = field(default_factory=dict)  # where the start-up time went
