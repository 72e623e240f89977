"""Writes small GGUF files with the `gguf` package's own writer and table of names: the tests' second source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter, get_tensor_name_map
from gguf.constants import MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "b", "ab"]
VOCABULARY = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": [0.0] * 259 + [-1.0, -2.0, -3.0, -0.5],
    "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * 4,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def write_gguf(path: Path, architecture: str, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """metadata: full keys, Python values (int as uint32); tensors: float32 arrays, or (bytes, quantisation)."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, tuple):
            writer.add_tensor(name, tensor[0], raw_dtype=tensor[1])
        else:
            writer.add_tensor(name, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tiny_model(model_type: str, **settings: Any) -> tuple[Any, dict[str, Tensor]]:
    """(transformers config, random parameters by transformers' names); tied ones once."""
    common = {"vocab_size": len(TOKENS), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
    common |= {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, **common | settings)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)
    return config, {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}


def as_gguf(
    path: Path,
    architecture: str,
    parameters: dict[str, Tensor],
    metadata: dict[str, Any],
    *,
    permuted_heads: tuple[int, int] | None = None,
    norm_offset: float = 0.0,
    quantisation: GGMLQuantizationType | None = None,
) -> Path:
    """The file a converter makes: names from the package's table, q and k rows of `permuted_heads` (query heads,
    key heads) interleaved, norms raised by `norm_offset`, matrices quantised."""
    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, 64)
    tensors: dict[str, Any] = {}
    for name, parameter in parameters.items():
        stem, _, suffix = name.rpartition(".")
        value = parameter.numpy()
        if permuted_heads and "q_proj" in name:
            value = interleaved(value, permuted_heads[0])
        if permuted_heads and "k_proj" in name:
            value = interleaved(value, permuted_heads[1])
        if norm_offset and name.endswith("norm.weight"):
            value = value + np.float32(norm_offset)
        for part, rows in _gate_and_up(stem, suffix, value).items():
            stored = f"{names.get_name(part)}.weight" if value.ndim == 3 else f"{names.get_name(part)}.{suffix}"
            is_exact = stem.endswith((".mlp.gate", ".shared_expert_gate"))
            if quantisation is not None and value.ndim > 1 and not is_exact:
                tensors[stored] = (quantize(rows, quantisation), quantisation)
            else:
                tensors[stored] = rows.squeeze()
    return write_gguf(path, architecture, VOCABULARY | metadata, tensors)


def _gate_and_up(stem: str, suffix: str, value: np.ndarray) -> dict[str, np.ndarray]:
    """Of all experts: in a tree joined, in files apart; what else there is as it is."""
    if value.ndim < 3:
        return {stem: value}
    if suffix == "down_proj":
        return {f"{stem}.{suffix}": value}
    gate, up = np.split(value, 2, axis=1)
    return {f"{stem}.gate_proj": gate, f"{stem}.up_proj": up}


def as_in_files(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tree's parameters as checkpoints have them: every expert's matrices apart."""
    apart: dict[str, Tensor] = {}
    for name, value in parameters.items():
        stem, _, suffix = name.rpartition(".")
        for part, rows in _gate_and_up(stem, suffix, value.numpy()).items():
            each = {part.replace(".experts.", f".experts.{i}."): row for i, row in enumerate(rows)}
            made = {f"{path}.weight": row for path, row in each.items()} if value.dim() == 3 else {name: value.numpy()}
            apart |= {path: torch.from_numpy(row) for path, row in made.items()}
    return apart


def interleaved(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row i of a head's first half beside row i of its second half."""
    first, second = np.split(rows.reshape(num_heads, -1, *rows.shape[1:]), 2, axis=1)
    return np.stack((first, second), axis=2).reshape(rows.shape)


def metadata_of(architecture: str, **more: Any) -> dict[str, Any]:
    """Architecture metadata that fits `tiny_model`."""
    fields: dict[str, Any] = {
        "block_count": 2,
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10000.0,
    }
    return {f"{architecture}.{key}": value for key, value in (fields | more).items()}
