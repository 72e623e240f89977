"""The wire fields that completions and chat share."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic.config import JsonDict

from engine.outputs import SamplingDefaults
from engine.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    MAX_N,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)
from engine.terms import MAX_PRIORITY
from server.protocol.beam import SearchFields
from server.protocol.errors import InvalidRequest
from server.protocol.fields import WireModel, shape
from server.protocol.parsing import at_most, short, wrong

MAX_CACHE_SALT_CHARS = 256
MAX_CHOICES = 10_000  # of a structured output
MAX_TIMEOUT_S = 86400.0

# response_format, in which `structured.py` reads what it needs; a description is for models that see the schema
RESPONSE_FORMAT = shape("type", json_schema=shape("name", "schema", "strict", hints=("description",)))

_TOKEN_ID = re.compile(r"-?[0-9]{1,20}", re.ASCII)


def stop_list(value: object, wanted: str = "a list of strings") -> object:
    """A list of strings -> tuple of them."""
    if value is None:
        return ()
    if not isinstance(value, list) or any(type(item) is not str for item in value):
        raise wrong(f"must be {wanted}.")
    if len(value) > MAX_STOP_STRINGS:
        raise wrong(f"must have at most {MAX_STOP_STRINGS} strings, got {len(value)}.")
    if "" in value:
        raise wrong("must not hold an empty string.")
    return tuple(value)


def _stop(value: object) -> object:
    """A string or a list of strings -> tuple of strings."""
    return stop_list([value] if isinstance(value, str) else value, "a string or a list of strings")


def _token_ids(limit: int) -> BeforeValidator:
    """A list of at most `limit` token ids -> tuple of them."""

    def check(value: object) -> object:
        if value is None:
            return ()
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            raise wrong("must be a list of integers.")
        if len(value) > limit:
            raise wrong(f"must have at most {limit} token ids, got {len(value)}.")
        return tuple(value)

    return BeforeValidator(check)


def _logit_bias(value: object) -> object:
    """{"token id": bias} -> ((token id, bias), ...). Bounds of bias and vocabulary are checked further in."""
    if value is None:
        return ()
    if not isinstance(value, dict):
        raise wrong("must be an object that maps token ids to numbers.")
    if len(value) > MAX_LOGIT_BIAS:
        raise wrong(f"must have at most {MAX_LOGIT_BIAS} entries, got {len(value)}.")
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise wrong(f"has the key {short(key)}, which is no token id.")
        if type(bias) not in (int, float):
            raise wrong(f"maps {short(key)} to {short(bias)}, which is no number.")
        pairs[int(key)] = float(bias)
    return tuple(pairs.items())


def _salt(value: object) -> object:
    if isinstance(value, str) and len(value) > MAX_CACHE_SALT_CHARS:
        raise wrong(f"must have at most {MAX_CACHE_SALT_CHARS} characters, got {len(value)}.")
    return value


CacheSalt = Annotated[str | None, BeforeValidator(_salt), Field(json_schema_extra={"maxLength": MAX_CACHE_SALT_CHARS})]


def within(low: float, high: float | None = None) -> Any:
    """A field that may be absent. Its bounds stand in the description of the API; who checks them is
    SamplingParams."""
    bounds: JsonDict = {"minimum": low} if high is None else {"minimum": low, "maximum": high}
    return Field(default=None, json_schema_extra=bounds)


def _timeout(value: object) -> object:
    if value is not None and not (type(value) in (int, float) and 0 < value <= MAX_TIMEOUT_S):  # type: ignore[operator]
        raise wrong(f"must be a number of seconds, more than 0 and at most {MAX_TIMEOUT_S:g}, got {short(value)}.")
    return value


def _priority(value: object) -> object:
    if value is not None and not (type(value) is int and abs(value) <= MAX_PRIORITY):
        raise wrong(f"must be a whole number between {-MAX_PRIORITY} and {MAX_PRIORITY}, got {short(value)}.")
    return value


# seconds since the request arrived; then it ends with an error
Timeout = Annotated[
    float | None, BeforeValidator(_timeout), Field(json_schema_extra={"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S})
]
# among the requests of one API key those with lower numbers are served first
Priority = Annotated[
    int | None,
    BeforeValidator(_priority),
    Field(json_schema_extra={"minimum": -MAX_PRIORITY, "maximum": MAX_PRIORITY}),
]

STOP_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOP_STRINGS},
            {"type": "null"},
        ]
    }
)
BIAS_SCHEMA = WithJsonSchema(
    {
        "anyOf": [
            {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
            {"type": "null"},
        ],
        "description": "Token id, as text -> what is added to its logit.",
    }
)


class StreamOptions(WireModel):
    hints: ClassVar = frozenset({"include_obfuscation", "continuous_usage_stats"})

    include_usage: bool | None = None


class GenerationRequest(SearchFields):
    """What completions and chat have in common. A field that is None was absent or null."""

    hints: ClassVar = frozenset(
        {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "user"}
    )

    shapes: ClassVar = {"response_format": RESPONSE_FORMAT}

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = within(1, MAX_N)
    max_tokens: int | None = within(0)
    min_tokens: int | None = within(0)
    temperature: float | None = within(0)
    top_p: float | None = within(0, 1)
    top_k: int | None = within(-1)
    min_p: float | None = within(0, 1)
    seed: int | None = within(-(2**63), 2**63 - 1)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop), STOP_SCHEMA] = ()
    stop_token_ids: Annotated[tuple[int, ...], _token_ids(MAX_STOP_TOKEN_IDS)] = ()
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = within(-2, 2)
    frequency_penalty: float | None = within(-2, 2)
    repetition_penalty: float | None = within(1e-3, 1e3)
    logit_bias: Annotated[tuple[tuple[int, float], ...], BeforeValidator(_logit_bias), BIAS_SCHEMA] = ()
    logprob_token_ids: Annotated[tuple[int, ...], _token_ids(MAX_LOGPROB_TOKEN_IDS)] = ()
    logprobs_mode: Literal["raw", "processed", "raw_logprobs", "processed_logprobs"] | None = None
    return_token_ids: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: CacheSalt = None
    timeout: Timeout = None
    priority: Priority = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None  # a schema, or its text
    guided_regex: str | None = None
    guided_choice: Annotated[list[str] | None, at_most(MAX_CHOICES)] = None
    guided_grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check_common(self) -> None:
        """Raises InvalidRequest for what no single field can tell."""
        self.check_search()
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is only allowed when stream is true.", param="stream_options")

    def sampling_params(
        self, defaults: SamplingDefaults, *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The engine's parameters: an explicit value wins, then the model's default, then OpenAI's.

        Raises engine.sampling_params.InvalidParameter for a value out of bounds."""
        if self.use_beam_search:
            defaults = SamplingDefaults()  # nothing is drawn
        return SamplingParams(
            n=_or(self.n, 1),
            max_tokens=max_tokens,
            min_tokens=_or(self.min_tokens, 0),
            temperature=_or(self.temperature, defaults.temperature, 1.0),
            top_p=_or(self.top_p, defaults.top_p, 1.0),
            top_k=_or(self.top_k, defaults.top_k, 0),
            min_p=_or(self.min_p, defaults.min_p, 0.0),
            seed=self.seed,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            ignore_eos=bool(self.ignore_eos),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            repetition_penalty=_or(self.repetition_penalty, defaults.repetition_penalty, 1.0),
            logit_bias=self.logit_bias,
            logprobs=logprobs,
            logprob_token_ids=self.logprob_token_ids,
            logprobs_mode="processed" if (self.logprobs_mode or "").startswith("processed") else "raw",
            skip_special_tokens=self.skip_special_tokens is not False,
            beam=self.search(_or(self.n, 1), getattr(self, "best_of", None)),
        )


Number = TypeVar("Number", int, float)


def _or(*values: Number | None) -> Number:
    """The first value that is not None: 0 is a value, so `or` would be wrong."""
    return next(value for value in values if value is not None)
