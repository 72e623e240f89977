"""Which transformers models may be served, decided from config and structure, never from a model's name.

Knows what our attention hook can and cannot carry; knows nothing of weights. A model that keeps state outside
attention, that builds its own positions or that hides windows from us runs without an error and answers
nonsense, so everything unknown is refused with one sentence.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.config import StartError
from engine.models.tensor_names import CHOOSING

KNOWN_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
# Exact in a sweep over all architectures although their class does not set _supports_attention_backend.
TESTED_WITHOUT_FLAG = frozenset({"biogpt", "stablelm"})
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
# Rotation frequencies that depend on the longest position in the batch: exact only below a fixed length.
LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def text_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """The language part of a config.json: a multimodal one nests it under text_config."""
    nested = hf_config.get("text_config")
    return dict(nested) if isinstance(nested, Mapping) and nested.get("model_type") else dict(hf_config)


def load_config(hf_config: Mapping[str, Any]) -> Any:
    """transformers' config object for a parsed config.json. Raises StartError if the type is unknown or refused."""
    values = text_config(hf_config)
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING_NAMES:
        raise StartError(f"Model type {model_type!r} is not one this version of transformers knows.")
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise StartError(f"Model type {model_type!r} has no causal language model in transformers.")
    quantization = hf_config.get("quantization_config") or values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise StartError(
            f"The weights are quantised with {method!r}, which is not supported; use a GGUF file instead."
        )
    config_class = getattr(_package(model_type), CONFIG_MAPPING_NAMES[model_type])
    try:
        config = config_class.from_dict(values)
    except Exception as error:  # config classes validate themselves and raise kinds of their own
        raise StartError(f"config.json of model type {model_type!r} cannot be used: {one_line(error)}.") from error
    for name in SIZES:
        size = getattr(config, name, None)
        if size is not None and (not isinstance(size, int) or size < 1):
            raise StartError(f"config.json of model type {model_type!r} has {name} {size!r}.")
    return config


def model_class(config: Any) -> Any:
    """The ForCausalLM class of `config`; imports only that model's module (AutoModel imports far more), or that of
    another one that serves this type too."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    return getattr(_package(config.model_type), name, None) or getattr(transformers, name)


def one_line(error: Exception) -> str:
    """An error's text on one line, without its full stop, to stand inside a sentence."""
    return " ".join(str(error).split())[:300].rstrip(".:") or type(error).__name__


def _package(model_type: str) -> Any:
    return importlib.import_module(f"transformers.models.{model_type_to_module_name(model_type)}")


def check_config(config: Any, cls: Any) -> None:
    """The part of the allow rule that needs no tree. Raises StartError with the reason."""
    kind = f"Model type {config.model_type!r}"
    if getattr(config, "is_encoder_decoder", False):
        raise StartError(f"{kind} is an encoder-decoder; only decoder-only language models are served.")
    if getattr(cls, "_is_stateful", False):
        raise StartError(f"{kind} keeps a recurrent state beside attention, which is not supported.")
    if not getattr(cls, "_supports_attention_backend", False) and config.model_type not in TESTED_WITHOUT_FLAG:
        raise StartError(f"{kind} does not let its attention be replaced, so it cannot use the paged cache.")
    for name in getattr(config, "layer_types", None) or ():
        if name not in KNOWN_LAYER_TYPES:
            raise StartError(f"{kind} has layers of type {name!r}, which is not supported.")


def check_tree(config: Any, tree: nn.Module, num_attention_calls: int) -> None:
    """The part that needs the built tree: every layer attends and nothing convolves. Raises StartError."""
    kind = f"Model type {config.model_type!r}"
    for name, module in tree.named_modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.RNNBase):
            raise StartError(
                f"{kind} mixes a {type(module).__name__} ({name}) with attention, which is not supported."
            )
    layers = int(config.num_hidden_layers)
    if num_attention_calls < layers:
        raise StartError(
            f"{kind} calls the attention hook {num_attention_calls} times in {layers} layers, so some layers keep "
            "their state elsewhere, which is not supported."
        )


def rope_parameter_sets(config: Any) -> dict[str, Mapping[str, Any]]:
    """Rotary settings by layer type; the key is "" where all layers share one set."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return {"": parameters}
    return {key: value for key, value in parameters.items() if isinstance(value, Mapping)}


def max_exact_position(config: Any) -> int:
    """Trained context in tokens, cut to what one fixed set of rotation frequencies covers.

    Past that length "dynamic" and "longrope" rotate every earlier token differently, so a cached key would be
    wrong; transformers recomputes instead."""
    trained: int | None = getattr(config, "max_position_embeddings", None)
    limit = trained or 2048
    for parameters in rope_parameter_sets(config).values():
        if parameters.get("rope_type") in LENGTH_DEPENDENT_ROPE:
            original: int | None = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            limit = min(limit, limit if original is None else original)
    return limit


def expected_lookback(config: Any, num_calls: int) -> list[tuple[int | None, int | None]]:
    """(window, chunk) in tokens that config.json implies for each attention call, in call order."""
    window: int | None = getattr(config, "sliding_window", None)
    chunk: int | None = getattr(config, "attention_chunk_size", None)
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or len(layer_types) == 0:
        uses_window = window is not None and getattr(config, "use_sliding_window", True)
        return [(window if uses_window else None, None)] * num_calls
    if num_calls % len(layer_types):
        raise StartError(
            f"Model type {config.model_type!r} makes {num_calls} attention calls for {len(layer_types)} layer types, "
            "so the lookback of each call is unknown."
        )
    calls_per_layer = num_calls // len(layer_types)
    lookback: list[tuple[int | None, int | None]] = []
    for name in layer_types:
        entry = (
            window if name == "sliding_attention" else None,
            chunk if name == "chunked_attention" else None,
        )
        lookback.extend([entry] * calls_per_layer)
    return lookback


def expected_softcap(config: Any) -> float | None:
    """Attention-score softcap that config.json implies, None without."""
    value = getattr(config, "attn_logit_softcapping", None)
    return float(value) if value else None


def float32_parameters(tree: Any, dtype: torch.dtype) -> tuple[str, ...]:
    """Name parts of parameters the model wants in float32 whatever the serving dtype is, or should want."""
    names = {CHOOSING, *(getattr(tree, "_keep_in_fp32_modules_strict", None) or ())}
    if dtype == torch.float16:
        names |= set(getattr(tree, "_keep_in_fp32_modules", None) or ())
    return tuple(sorted(names))
