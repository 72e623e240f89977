"""GGUF metadata as the config.json and generation_config.json the model was converted from.

One `Family` per GGUF architecture says which transformers model it is and what its metadata leaves unsaid because
llama.cpp has it in code. Architectures that are not listed are refused by name: a guessed config answers nonsense.
Metadata keys are those of the GGUF specification; "llama.block_count" reads here as field("block_count").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from engine.models.gguf import GgufError, GgufFile
from engine.models.tensor_names import MIXTRAL, PLAIN_DIALECT, Dialect

HfConfig = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """How one GGUF architecture maps to transformers.

    permuted: q and k rows are stored in the order of rotating neighbouring pairs and must be put back.
    norm_offset: stored norm weights are this much larger than transformers'.
    extra: further config entries, from the file and the common config.
    dialect: of the tensors' names.
    """

    model_type: str
    architecture: str
    permuted: bool = False
    norm_offset: float = 0.0
    extra: Callable[[_Fields, HfConfig], HfConfig] | None = None
    dialect: Dialect = PLAIN_DIALECT


class _Fields:
    """The metadata of one file under its architecture's prefix."""

    def __init__(self, gguf: GgufFile, prefix: str) -> None:
        self.gguf = gguf
        self._prefix = prefix

    def get(self, key: str, default: Any = None) -> Any:
        return self.gguf.metadata.get(f"{self._prefix}.{key}", default)

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number that must be there if there is no default; per-layer lists must agree. GgufError."""
        value = self.get(key, default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise GgufError(f"{self.gguf.path} has no number under {self._prefix}.{key}: {str(value)[:60]}.")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """`number` where only whole ones make sense."""
        value = self.number(key, default)
        if value != int(value):
            raise GgufError(f"{self.gguf.path} has no whole number under {self._prefix}.{key}: {value}.")
        return int(value)


def family(gguf: GgufFile) -> Family:
    """Raises GgufError for an architecture that is not listed."""
    name = gguf.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in FAMILIES | MIXTURES:
        raise GgufError(
            f"GGUF files of the architecture {str(name)[:60]!r} are not supported (supported: "
            f"{', '.join(sorted(FAMILIES | MIXTURES))}); a folder with safetensors may be."
        )
    if (parts := gguf.metadata.get("split.count", 1)) != 1:
        raise GgufError(f"{gguf.path} is one of {parts} parts of a model: join them first (llama-gguf-split --merge).")
    families = MIXTURES if any("_exps." in tensor for tensor in gguf.tensors) else FAMILIES
    if name not in families or (families is MIXTURES and _EXPERTS not in gguf.tensors):
        raise GgufError(f"{gguf.path} is a mixture of experts (or none) in a way that is not supported for {name!r}.")
    return families[name]


def hf_config(gguf: GgufFile) -> HfConfig:
    """The equivalent of config.json. Raises GgufError."""
    kind = family(gguf)
    fields = _Fields(gguf, gguf.metadata["general.architecture"])
    if "token_embd.weight" not in gguf.tensors:
        raise GgufError(f"{gguf.path} has no token embeddings: it is a vocabulary or an adapter, no model.")
    hidden_size = fields.count("embedding_length")
    num_heads = fields.count("attention.head_count")
    config: HfConfig = {
        "architectures": [kind.architecture],
        "model_type": kind.model_type,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.count("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.count("attention.head_count_kv", num_heads),
        "head_dim": fields.count("attention.key_length", max(hidden_size // num_heads, 1)),
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": _shortest(fields.number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(fields.number("rope.freq_base", 10000.0)),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }
    for key in ("bos_token_id", "eos_token_id"):
        config[key] = gguf.metadata.get(f"tokenizer.ggml.{key}")
    config["pad_token_id"] = gguf.metadata.get("tokenizer.ggml.padding_token_id")
    rotary = fields.count("rope.dimension_count", config["head_dim"])
    if rotary != config["head_dim"]:
        config["partial_rotary_factor"] = rotary / config["head_dim"]
    if scaling := _rope_scaling(fields, config):
        config["rope_scaling"] = scaling
    return config | (kind.extra(fields, config) if kind.extra else {})


def generation_config(gguf: GgufFile) -> HfConfig:
    """The equivalent of generation_config.json: sampling values and end ids that the metadata names."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    names["penalty_repeat"] = "repetition_penalty"
    config: HfConfig = {}
    for key, name in names.items():
        value = gguf.metadata.get(f"general.sampling.{key}")
        if value is not None:
            config[name] = _shortest(value) if isinstance(value, float) else value
    return config


def _shortest(value: float) -> float:
    """The decimal that a float32 was written for: 1e-05 instead of 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(fields: _Fields, config: HfConfig) -> HfConfig | None:
    if "rope_freqs.weight" in fields.gguf.tensors:
        return _llama3_scaling(fields.gguf, config)
    kind = fields.get("rope.scaling.type", "none")
    original = fields.get("rope.scaling.original_context_length")
    if kind == "linear":
        return {"rope_type": "linear", "factor": _shortest(fields.number("rope.scaling.factor"))}
    if kind == "yarn":
        scaling: HfConfig = {"rope_type": "yarn", "factor": _shortest(fields.number("rope.scaling.factor"))}
        return scaling | ({"original_max_position_embeddings": original} if original else {})
    if kind not in ("none", "longrope"):
        raise GgufError(f"{fields.gguf.path} scales its positions by {str(kind)[:40]!r}, which is not supported.")
    if "rope_factors_long.weight" not in fields.gguf.tensors:
        return None
    long, short = (_floats(fields.gguf, f"rope_factors_{name}.weight") for name in ("long", "short"))
    config["original_max_position_embeddings"] = original or config["max_position_embeddings"]
    return {"rope_type": "longrope", "long_factor": long.tolist(), "short_factor": short.tolist()}


def _llama3_scaling(gguf: GgufFile, config: HfConfig) -> HfConfig:
    """Llama 3.1's rule is stored as its result, one divisor per frequency; the parameters are found again from the
    largest divisor and verified. Raises GgufError if no such rule gives these divisors."""
    stored = _floats(gguf, "rope_freqs.weight").astype(np.float64)
    factor, low, high, original = float(stored.max()), 1.0, 4.0, 8192
    half = config["head_dim"] // 2
    wavelengths = 2 * math.pi * config["rope_theta"] ** (np.arange(half) / half)
    blend = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    if stored.shape != (half,) or not np.allclose(stored, 1 / ((1 - blend) / factor + blend), rtol=1e-3):
        raise GgufError(f"{gguf.path} scales its positions in a way that is not supported (rope_freqs).")
    return {
        "rope_type": "llama3",
        "factor": _shortest(factor),
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _floats(gguf: GgufFile, name: str) -> np.ndarray:
    if name not in gguf.tensors or gguf.tensors[name].kind != GGMLQuantizationType.F32:
        raise GgufError(f"{gguf.path} has no float32 tensor {name}.")
    return gguf.data(name).view(np.float32)


def _gemma(fields: _Fields, config: HfConfig) -> HfConfig:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _alternating(num_layers: int, period: int) -> list[str]:
    """Every period-th layer sees everything, the others a window."""
    return ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]


def _windowed(fields: _Fields, config: HfConfig, period: int, layers_of_largest: int) -> HfConfig:
    """Gemma 2 and 3. Their largest models scale attention by the mean head width instead of the head size."""
    largest = config["num_hidden_layers"] == layers_of_largest
    scalar = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    pattern = fields.get("attention.sliding_window_pattern")
    if isinstance(pattern, list) and len(pattern) == config["num_hidden_layers"]:
        layer_types = ["sliding_attention" if local else "full_attention" for local in pattern]
    else:
        layer_types = _alternating(config["num_hidden_layers"], pattern if isinstance(pattern, int) else period)
    return _gemma(fields, config) | {
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": layer_types,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": fields.get("attn_logit_softcapping"),
        "final_logit_softcapping": fields.get("final_logit_softcapping"),
    }


def _gemma2(fields: _Fields, config: HfConfig) -> HfConfig:
    return _windowed(fields, config, period=2, layers_of_largest=46)


def _gemma3(fields: _Fields, config: HfConfig) -> HfConfig:
    local = _shortest(fields.number("rope.freq_base_swa", 10000.0))
    return _windowed(fields, config, period=6, layers_of_largest=62) | {"rope_local_base_freq": local}


def _phi3(fields: _Fields, config: HfConfig) -> HfConfig:
    return {"sliding_window": fields.get("attention.sliding_window") or None}


def _granite(fields: _Fields, config: HfConfig) -> HfConfig:
    return {
        "attention_multiplier": fields.number("attention.scale"),
        "embedding_multiplier": fields.number("embedding_scale"),
        "residual_multiplier": fields.number("residual_scale"),
        "logits_scaling": fields.number("logit_scale"),
    }


def _mixture(fields: _Fields, config: HfConfig) -> HfConfig:
    """llama.cpp has in code whether the weights of those chosen are divided by their sum."""
    tensors = fields.gguf.tensors
    count = fields.count("expert_count")
    if len(tensors[_EXPERTS].shape) != 3 or tensors[_EXPERTS].shape[0] != count:
        raise GgufError(f"{fields.gguf.path} has {_EXPERTS} of another shape than {count} experts have.")
    width = tensors[_EXPERTS].shape[1]
    chosen = {"num_experts_per_tok": fields.count("expert_used_count"), "norm_topk_prob": False}
    shared = tensors.get("blk.0.ffn_gate_shexp.weight")
    if shared is not None:
        chosen["shared_expert_intermediate_size"] = shared.shape[0]
    return {"num_experts": count, "moe_intermediate_size": width} | chosen


def _normalised(fields: _Fields, config: HfConfig) -> HfConfig:
    return _mixture(fields, config) | {"norm_topk_prob": True}


def _olmoe(fields: _Fields, config: HfConfig) -> HfConfig:
    mixture = _mixture(fields, config)
    return mixture | {
        "intermediate_size": mixture["moe_intermediate_size"],
        "clip_qkv": fields.get("attention.clamp_kqv"),
    }


def _mixtral(fields: _Fields, config: HfConfig) -> HfConfig:
    mixture = _mixture(fields, config)
    return {
        "num_local_experts": mixture["num_experts"],
        "num_experts_per_tok": mixture["num_experts_per_tok"],
        "intermediate_size": mixture["moe_intermediate_size"],
    }


FAMILIES: dict[str, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", permuted=True),
    "smollm3": Family("smollm3", "SmolLM3ForCausalLM", permuted=True),
    "granite": Family("granite", "GraniteForCausalLM", permuted=True, extra=_granite),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "olmo2": Family("olmo2", "Olmo2ForCausalLM"),
    "phi3": Family("phi3", "Phi3ForCausalLM", extra=_phi3),
    "gemma": Family("gemma", "GemmaForCausalLM", norm_offset=1.0, extra=_gemma),
    "gemma2": Family("gemma2", "Gemma2ForCausalLM", norm_offset=1.0, extra=_gemma2),
    "gemma3": Family("gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0, extra=_gemma3),
}
_EXPERTS = "blk.0.ffn_gate_exps.weight"
MIXTURES: dict[str, Family] = {  # where the file has experts
    "llama": Family("mixtral", "MixtralForCausalLM", permuted=True, extra=_mixtral, dialect=MIXTRAL),
    "qwen2moe": Family("qwen2_moe", "Qwen2MoeForCausalLM", extra=_mixture),
    "qwen3moe": Family("qwen3_moe", "Qwen3MoeForCausalLM", extra=_normalised),
    "olmoe": Family("olmoe", "OlmoeForCausalLM", extra=_olmoe),
}
