"""Facts read off a model's config.json and generation_config.json, and the choice of dtype. No torch.

All functions take dictionaries as the files hold them; a multimodal model's language part ("text_config") counts
where the outer config is silent.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from engine.config import Dtype, StartError
from engine.outputs import SamplingDefaults

_FLOAT32_LEVELS = frozenset({"portable", "neon"})  # the ISA levels of csrc on which splitting bfloat16 costs much


def choose_dtype(requested: Dtype, isa_level: str, device_type: str = "cpu") -> str:
    """The dtype to compute in: on a CPU "float32" or "bfloat16", on "cuda" "bfloat16" or "float16".

    isa_level: the level of the native library in use (config.CpuIsa without "auto"); "auto" takes bfloat16
    where it is no slower than float32, which is everywhere but on narrow vectors without an instruction for it
    (docs/performance.md). Raises StartError.
    """
    if device_type == "cuda":
        if requested == "float32":
            raise StartError(
                "--dtype float32 is not served on a CUDA device, whose kernels multiply bfloat16 and float16: leave "
                "it out, or use --device cpu."
            )
        return "bfloat16" if requested == "auto" else requested
    if requested == "float16":
        raise StartError("--dtype float16 is not supported on a CPU, which has no float16 arithmetic: use bfloat16.")
    if requested == "auto":
        return "float32" if isa_level in _FLOAT32_LEVELS else "bfloat16"
    return requested


def check_no_code(hf_config: Mapping[str, Any], where: object) -> None:
    """Raises StartError if the model wants its own Python code run."""
    if any(config.get("auto_map") for config in _with_text_config(hf_config)):
        raise StartError(
            f"{where} needs Python code of its own (auto_map in its config); code from a model folder is never run."
        )


def eos_ids(*values: Any) -> tuple[int, ...]:
    """The union of end-of-sequence ids, first mention first. A value is an id, a list of ids or None."""
    found: dict[int, None] = {}
    for value in values:
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, int) and not isinstance(item, bool) and item >= 0:
                found[item] = None
    return tuple(found)


def sampling_defaults(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """What generation_config asks for; values that make no sense count as absent. do_sample false means greedy
    decoding, whatever else stands there."""
    if generation_config.get("do_sample") is False:
        return SamplingDefaults(
            temperature=0.0, repetition_penalty=_real(generation_config, "repetition_penalty", 1e-3, 1e3)
        )
    top_k = generation_config.get("top_k")
    return SamplingDefaults(
        temperature=_real(generation_config, "temperature", 0.0, math.inf),
        top_p=_real(generation_config, "top_p", 0.0, 1.0),
        top_k=top_k if isinstance(top_k, int) and not isinstance(top_k, bool) and top_k >= 0 else None,
        min_p=_real(generation_config, "min_p", 0.0, 1.0),
        repetition_penalty=_real(generation_config, "repetition_penalty", 1e-3, 1e3),
    )


def max_position(hf_config: Mapping[str, Any]) -> int:
    """Tokens the model was trained for: prompt and output together. Raises StartError if the config is silent."""
    for config in _with_text_config(hf_config):
        for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"):
            value = config.get(key)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
    raise StartError("The model's config does not say how many positions it was trained for: give --max-model-len.")


def architecture(hf_config: Mapping[str, Any]) -> str:
    """The class name in "architectures", or the model type where there is none."""
    names = hf_config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    return str(hf_config.get("model_type", "unknown"))


def _with_text_config(hf_config: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    yield hf_config
    inner = hf_config.get("text_config")
    if isinstance(inner, dict):
        yield inner


def _real(config: Mapping[str, Any], key: str, low: float, high: float) -> float | None:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and low <= value <= high else None
