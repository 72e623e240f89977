"""GGUF tensors as transformers' parameters: the names, and the two ways in which the stored numbers differ.

* Rotary pairs. Files made for llama.cpp's first rotary kernel hold each head's q and k rows as pairs
  (0, half), (1, half + 1), ...; transformers rotates row i with row i + half, so the rows are put back.
* Gemma's norms multiply by 1 + weight; the file stores the sum.

Experts are stored in one tensor of all; here each has its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from engine.models.dequantize import dequantize
from engine.models.gguf import GgufError, GgufFile, TensorInfo
from engine.models.gguf_config import Family, HfConfig
from engine.models.gguf_quantised import own_precision
from engine.models.quantised import QuantisedWeight

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.*.gate_proj",
    "ffn_up_exps": "mlp.experts.*.up_proj",
    "ffn_down_exps": "mlp.experts.*.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ALL_EXPERTS = ".*."
_MOST_EXPERTS = 4096
_DERIVED = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def parameters(gguf: GgufFile, kind: Family) -> dict[str, TensorInfo]:
    """By the parameter's name in transformers' checkpoints: what is stored, of the tensors of all experts each one's
    part. Raises GgufError for tensors that no parameter takes: leaving weights out would answer nonsense."""
    found: dict[str, TensorInfo] = {}
    for name, info in gguf.tensors.items():
        parameter = None if name in _DERIVED else _parameter_name(name, gguf.tensors)
        if parameter is not None and _ALL_EXPERTS in parameter:
            if len(info.shape) != 3 or info.shape[0] > _MOST_EXPERTS:
                raise GgufError(f"{gguf.path} has the tensor {name} of shape {info.shape}, which is none of experts.")
            parts = {
                parameter.replace(_ALL_EXPERTS, f".{index}."): part for index, part in enumerate(info.along_first())
            }
            found |= {kind.dialect.theirs(part): stored for part, stored in parts.items()}
        elif parameter is not None:
            found[kind.dialect.theirs(parameter)] = _as_matrix(info) if "shared_expert_gate" in parameter else info
        elif name not in _DERIVED:
            raise GgufError(f"{gguf.path} has the tensor {name}, which has no place in a known model.")
    return found


def _as_matrix(info: TensorInfo) -> TensorInfo:
    """One row, which is stored without saying so."""
    return replace(info, shape=(1, *info.shape)) if len(info.shape) == 1 else info


def parameter(gguf: GgufFile, info: TensorInfo, kind: Family, config: HfConfig, dtype: torch.dtype) -> Tensor:
    """One tensor as transformers has it: [*info.shape] dtype, memory of its own."""
    offset = kind.norm_offset if info.name.endswith("norm.weight") else 0.0
    value = dequantize(gguf.data_of(info), info.kind, info.shape, torch.float32 if offset else dtype)
    if offset:
        value = (value - offset).to(dtype)
    num_heads = _permuted_heads(gguf, info, kind, config)
    return value if num_heads is None else _rows_of_halves(value, num_heads)


def quantised_parameter(gguf: GgufFile, info: TensorInfo, kind: Family, config: HfConfig) -> QuantisedWeight | None:
    """One matrix in its own precision; None if it is floating point. Raises GgufError, StartError."""
    weight = own_precision(gguf.data_of(info), info.kind, info.shape)
    num_heads = None if weight is None else _permuted_heads(gguf, info, kind, config)
    if weight is None or num_heads is None:
        return weight
    return weight.with_rows(lambda rows: _rows_of_halves(rows, num_heads))


def _permuted_heads(gguf: GgufFile, info: TensorInfo, kind: Family, config: HfConfig) -> int | None:
    """How many heads' rows must be put back, None if the tensor's rows lie as transformers wants them."""
    heads = {".attn_q.": "num_attention_heads", ".attn_k.": "num_key_value_heads"}
    key = next((key for part, key in heads.items() if part in info.name), None)
    if key is None or not kind.permuted:
        return None
    if info.shape[0] != config[key] * config["head_dim"]:
        raise GgufError(f"{gguf.path} has {info.shape[0]} rows in {info.name}, which do not fit its heads.")
    num_heads: int = config[key]
    return num_heads


def _parameter_name(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    stem, _, suffix = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{suffix}"
    found = _LAYER_NAME.fullmatch(name)
    if not found or found[2] not in _LAYER:
        return None
    layer, part = found[1], _LAYER[found[2]]
    if found[2] == "ffn_norm" and f"blk.{layer}.post_attention_norm.weight" in tensors:
        part = "pre_feedforward_layernorm"  # a norm before and after each half of the layer
    if found[2] == "ffn_up" and f"blk.{layer}.ffn_gate.weight" not in tensors:
        part = "mlp.gate_up_proj"  # gate and up in one matrix, gate first
    return f"model.layers.{layer}.{part}.{suffix}"


def _rows_of_halves(value: Tensor, num_heads: int) -> Tensor:
    """[heads * head_dim, ...], pairs of neighbours within a head -> pairs half a head apart."""
    pairs = value.view(num_heads, -1, 2, *value.shape[1:])
    return pairs.transpose(1, 2).reshape(value.shape)
