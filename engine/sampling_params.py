"""How one request wants its tokens chosen. Frozen, validated once; what needs the vocabulary is checked at
the engine's door (`check_vocabulary`). Bounds follow OpenAI's API description and, where it is silent, vLLM.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import Literal

MAX_N = 128
MAX_LOGIT_BIAS = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096  # all stop strings together
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20  # OpenAI's; a server may allow more
LOGPROBS_CEILING = 1000  # and never more than this
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LENGTH_PENALTY = 20.0  # either sign; a million tokens to this power is still a number
GREEDY_TEMPERATURE = 1e-5  # at and below this, dividing by the temperature only loses digits

Pooling = Literal["last", "mean"]


class InvalidParameter(ValueError):
    """A request field is out of bounds. `param` is its wire name."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class UnusableForm(InvalidParameter):
    """What a text should match cannot be held to.

    reason: goes on after "FIELD is not usable: " and the place in the field's text. line: of the Lark grammar that
    the form is, or that its calls are, from 1; None: elsewhere, or nobody knows where. keywords: those of a JSON
    schema that cannot be enforced."""

    def __init__(
        self, param: str, reason: str, *, place: str = "", line: int | None = None, keywords: tuple[str, ...] = ()
    ) -> None:
        super().__init__(param, f"{param} is not usable: {place}{reason}")
        self.reason = reason
        self.line = line
        self.keywords = keywords


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around a model's thinking, as text. opened: the prompt ends inside the block, so the output begins
    with thinking; otherwise the output may begin with `start` (after blanks), and if it does not there is none."""

    start: str
    end: str
    opened: bool


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What the text must match, once the reasoning (if any) has ended.

    source by kind: json: a JSON schema; json_object: empty; regex: the pattern; choice: a JSON list of strings;
    lark: a Lark grammar in llguidance's dialect.
    param: the wire name of the field it came from, for complaints; two equal forms may come from different fields.
    calls: a Lark grammar as well: the text matches this or the form, which then is no Lark grammar itself."""

    kind: Literal["json", "json_object", "regex", "choice", "lark"]
    source: str = ""
    param: str = field(default="structured_outputs", compare=False)
    calls: str = ""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """The n most likely outputs that a search along `width` hypotheses finds, as transformers' beam search does.

    length_penalty: an output's score is the sum of its logprobs over its length to this power: above 0 favours long
        ones. early_stopping: True ends the search with `width` finished hypotheses; False when no running one could
        beat the worst finished one at its present length; "never" when it could not at any length."""

    width: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        """Raises InvalidParameter."""
        _int("best_of", self.width, 1, MAX_N)
        _real("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.early_stopping not in (True, False, "never"):
            raise InvalidParameter("early_stopping", 'early_stopping must be true, false or "never".')


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request; shared by its n sequences.

    max_tokens: output tokens per sequence (None: what remains of max_model_len; 0: the prompt is only computed).
    seed: int64; None draws a fresh one per request.
    stop: strings searched in the text by the assembler, never by the engine; one string is one stop string.
    logit_bias: (token id, bias) pairs, or a dict of them.
    logprobs: number of alternatives reported per token; None reports none.
    prompt_logprobs: the same for the prompt's tokens, always of the model's own distribution. The prompt is then
        computed anew, whatever the prefix cache holds of it.
    logprob_token_ids: ids whose logprobs are reported beside the alternatives of each output token.
    logprobs_mode: raw is the model's own distribution; processed the one the token was drawn from, behind penalties,
        bias, masks, temperature (where it is not greedy), top-k, top-p and min-p: what they exclude is not reported.
    penalties: presence and frequency over output tokens, repetition over prompt and output.
    reasoning: stop strings and structured output wait for the end of the thinking it marks.
    structured: a grammar for the text; `AsyncEngine.compile` must have accepted it.
    beam: the outputs are searched, not drawn: temperature, top_k and the like are not looked at.
    pooling: the outcome is a vector, made of the prompt's last hidden states ("last": of its last token; "mean": the
        mean over all); needs max_tokens 0.
    shown_special_tokens: special tokens that are text all the same with skip_special_tokens (marks of an output
        format).
    """

    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logprobs_mode: Literal["raw", "processed"] = "raw"
    skip_special_tokens: bool = True
    reasoning: ReasoningMarks | None = None
    structured: StructuredOutput | None = None
    beam: BeamSearch | None = None
    pooling: Pooling | None = None
    shown_special_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raises InvalidParameter for every bound that does not need the vocabulary."""
        stop: object = self.stop
        bias: object = self.logit_bias
        object.__setattr__(self, "stop", (stop,) if isinstance(stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", tuple(bias.items() if isinstance(bias, dict) else self.logit_bias))
        _int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _int("max_tokens", self.max_tokens, 0, 2**31 - 1)
        _int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
            )
        _real("temperature", self.temperature, 0.0, math.inf)
        _real("top_p", self.top_p, 0.0, 1.0)
        _int("top_k", self.top_k, -1, 2**63 - 1)
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _int("seed", self.seed, -(2**63), 2**63 - 1)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 1e-3, 1e3)
        self._check_logprobs()
        if self.beam is not None:
            self._check_beam(self.beam)
        if self.pooling is not None and self.max_tokens != 0:
            raise InvalidParameter("max_tokens", "A pooled prompt has no output: max_tokens must be 0.")
        if len(self.stop) > MAX_STOP_STRINGS or sum(map(len, self.stop)) > MAX_STOP_CHARS:
            raise InvalidParameter(
                "stop",
                f"At most {MAX_STOP_STRINGS} stop strings of {MAX_STOP_CHARS} characters in all are allowed.",
            )
        if any(not s for s in self.stop):
            raise InvalidParameter("stop", "A stop string must not be empty.")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidParameter("stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} stop_token_ids are allowed.")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidParameter("logit_bias", f"At most {MAX_LOGIT_BIAS} logit_bias entries are allowed.")
        for _, value in self.logit_bias:
            _real("logit_bias", value, -100.0, 100.0)

    def _check_beam(self, beam: BeamSearch) -> None:
        """What a search cannot do, or would have to leave out."""
        if self.n > beam.width:
            raise InvalidParameter(
                "n", f"n ({self.n}) must not exceed the {beam.width} hypotheses of the beam search."
            )
        if self.max_tokens == 0:
            raise InvalidParameter("max_tokens", "A beam search needs max_tokens of at least 1.")
        refused = {
            "stop": bool(self.stop),
            "logit_bias": bool(self.logit_bias),
            "presence_penalty": self.presence_penalty != 0,
            "frequency_penalty": self.frequency_penalty != 0,
            "repetition_penalty": self.repetition_penalty != 1,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "logprob_token_ids": bool(self.logprob_token_ids),
            "logprobs_mode": self.logprobs_mode != "raw",
        }
        for name, is_given in refused.items():
            if is_given:
                raise InvalidParameter(name, f"{name} cannot be combined with beam search.")

    def _check_logprobs(self) -> None:
        object.__setattr__(self, "logprob_token_ids", tuple(self.logprob_token_ids))
        if self.logprobs is not None:
            _int("logprobs", self.logprobs, 0, LOGPROBS_CEILING)
        if self.prompt_logprobs is not None:
            _int("prompt_logprobs", self.prompt_logprobs, 0, LOGPROBS_CEILING)
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidParameter(
                "logprob_token_ids", f"At most {MAX_LOGPROB_TOKEN_IDS} logprob_token_ids are allowed."
            )
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidParameter("logprob_token_ids", "logprob_token_ids needs logprobs to be asked for.")
        if self.logprobs_mode not in ("raw", "processed"):
            raise InvalidParameter("logprobs_mode", "logprobs_mode must be raw or processed.")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises InvalidParameter if a token id in the parameters lies outside [0, vocab_size)."""
        for token_id, _ in self.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise InvalidParameter(
                    "logit_bias",
                    f"logit_bias has token id {token_id}, outside the vocabulary of {vocab_size} tokens.",
                )
        for name in ("stop_token_ids", "logprob_token_ids"):
            for token_id in getattr(self, name):
                if not 0 <= token_id < vocab_size:
                    raise InvalidParameter(
                        name, f"{name} has {token_id}, outside the vocabulary of {vocab_size} tokens."
                    )

    @property
    def greedy(self) -> bool:
        """True when the most likely token always wins, whatever the seed."""
        return self.temperature <= GREEDY_TEMPERATURE or self.top_k == 1 or self.top_p == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _int(param: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(param, f"{param} must be an integer between {low} and {high}, got {_short(value)}.")


def _real(param: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_within(value, low, high):
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise InvalidParameter(param, f"{param} must be a finite number {bound}, got {_short(value)}.")


def _is_within(value: float, low: float, high: float) -> bool:
    return abs(value) <= sys.float_info.max and low <= value <= high


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
