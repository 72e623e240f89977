"""Tiny configs of many model families, and trees with weights under which attention matters."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from engine.attention.base import AttentionBackend
from engine.models import attention_hook, build
from engine.models.allow import check_config, load_config, model_class
from engine.models.backbone import Backbone
from engine.models.prepare import prepare
from engine.models.shrink import draw_weights
from engine.models.tree import TreeModel

Way = Literal["plain", "swapped", "fused"]
VOCAB_SIZE = 131
BASE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 60,
    "intermediate_size": 100,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
# for families without a head size of their own
WIDE = {key: value for key, value in BASE.items() if key != "head_dim"} | {"hidden_size": 384}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {**BASE, "model_type": "llama"},
    "llama_1000": {
        **BASE,
        "model_type": "llama",
        "hidden_size": 1000,
        "intermediate_size": 60,
        "num_attention_heads": 4,
    },
    "llama_tied": {**BASE, "model_type": "llama", "tie_word_embeddings": True},
    "llama3_rope": {
        **BASE,
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {**WIDE, "model_type": "qwen2"},
    "qwen3": {**BASE, "model_type": "qwen3"},
    "mistral": {**BASE, "model_type": "mistral", "sliding_window": 8},
    "gemma2": {**BASE, "model_type": "gemma2", "sliding_window": 8},
    "gemma3": {**BASE, "model_type": "gemma3_text", "sliding_window": 8, "layer_types": SLIDING},
    "phi3": {**WIDE, "model_type": "phi3"},
    "olmo2": {**WIDE, "model_type": "olmo2"},
    "granite": {**WIDE, "model_type": "granite", "attention_multiplier": 0.125, "residual_multiplier": 0.5},
    "mixtral": {**BASE, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {**BASE, "model_type": "gpt_oss", "sliding_window": 8, "layer_types": SLIDING, "num_local_experts": 4},
    "llama4": {
        **BASE,
        "model_type": "llama4_text",
        "attention_chunk_size": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 60,
    },
    "gpt_neox": {**WIDE, "model_type": "gpt_neox"},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, "n_embd": 128, "n_layer": 3, "n_head": 2},
}
FUSED = ("llama", "llama_1000", "llama_tied", "llama3_rope", "qwen2", "qwen3", "mistral", "gemma3")
CLAIMED = ("llama", "llama_1000", "llama_tied", "llama3_rope", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "olmo2")


def plain_tree(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own tree with its own eager attention and masks."""
    tree = build.build_tree(load_config(CONFIGS[name]), dtype, "eager")
    draw_weights(tree)
    return tree


def paged_backbone(
    name: str, backend: AttentionBackend, way: Way = "swapped", dtype: torch.dtype = torch.float32
) -> Backbone:
    """The same weights over our attention: in transformers' modules, in those with ours swapped in, or fused."""
    attention_hook.register()
    config = load_config(CONFIGS[name])
    check_config(config, model_class(config))
    tree = build.build_tree(config, dtype, attention_hook.IMPLEMENTATION)
    build.assign_weights(tree, plain_tree(name, dtype).state_dict().items(), dtype)
    if way == "plain":
        return Backbone(TreeModel(tree, backend), batch_invariant=False, num_parameters=0)
    return prepare(tree, backend, 1024, fuse=way == "fused")


def tokens(count: int, seed: int = 1, vocab_size: int = VOCAB_SIZE) -> list[int]:
    ids: list[int] = torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


@torch.inference_mode()
def plain_logits(tree: Any, ids: list[int]) -> Tensor:
    """[num_tokens, vocab], float32."""
    logits: Tensor = tree(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    return logits


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference relative to the largest value."""
    return float((ours - theirs).abs().max() / theirs.abs().max())
