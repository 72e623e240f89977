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
# transformers' products of experts in bfloat16 want multiples of eight
MIXED = BASE | {"hidden_size": 72, "intermediate_size": 104}
FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
GRANITE_NUMBERS = {
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.22,
    "embedding_multiplier": 12.3,
    "logits_scaling": 6.0,
}

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
    "gemma2": {**BASE, "model_type": "gemma2", "sliding_window": 8, "final_logit_softcapping": 4.0},
    "gemma3": {**BASE, "model_type": "gemma3_text", "sliding_window": 8, "layer_types": SLIDING},
    "phi3": {**WIDE, "model_type": "phi3"},
    "phi3_longrope": {
        **WIDE,
        "model_type": "phi3",
        "original_max_position_embeddings": 256,
        "partial_rotary_factor": 0.75,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 256,
            "short_factor": [1.0 + 0.1 * i for i in range(24)],
            "long_factor": [2.0 + 0.5 * i for i in range(24)],
        },
    },
    "olmo2": {**WIDE, "model_type": "olmo2"},
    "olmo3": {**WIDE, "model_type": "olmo3", "sliding_window": 8, "layer_types": SLIDING},
    "granite": {**WIDE, **GRANITE_NUMBERS, "model_type": "granite"},
    "smollm3": {**WIDE, "model_type": "smollm3", "no_rope_layers": [1, 0, 1]},
    "glm4": {**BASE, "model_type": "glm4", "partial_rotary_factor": 0.5},
    "exaone4": {**BASE, "model_type": "exaone4", "sliding_window": 8, "layer_types": SLIDING},
    "cohere": {**WIDE, "model_type": "cohere", "logit_scale": 0.3, "tie_word_embeddings": True},
    "cohere2": {
        **BASE,
        "model_type": "cohere2",
        "logit_scale": 0.3,
        "sliding_window": 8,
        "layer_types": SLIDING,
        "tie_word_embeddings": True,
    },
    "starcoder2": {**WIDE, "model_type": "starcoder2", "sliding_window": 8},
    "stablelm": {**WIDE, "model_type": "stablelm", "partial_rotary_factor": 0.25, "use_qkv_bias": True},
    "ernie4_5": {**BASE, "model_type": "ernie4_5"},
    "gemma": {**BASE, "model_type": "gemma"},
    "seed_oss": {**BASE, "model_type": "seed_oss"},
    "olmoe": {
        **WIDE,
        "intermediate_size": 104,
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 6,
    },
    "qwen3_moe": {
        **MIXED,
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
    },
    "mixtral": {**MIXED, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        **WIDE,
        **FEW_EXPERTS,
        "intermediate_size": 104,
        "model_type": "qwen2_moe",
        "shared_expert_intermediate_size": 56,
        "norm_topk_prob": False,
    },
    "glm4_moe": {
        **MIXED,
        **FEW_EXPERTS,
        "model_type": "glm4_moe",
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.7,
        "norm_topk_prob": True,
        "use_qk_norm": True,
    },
    "ernie4_5_moe": {
        **MIXED,
        **FEW_EXPERTS,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "minimax_m2": {**MIXED, **FEW_EXPERTS, "model_type": "minimax_m2", "num_local_experts": 4, "rotary_dim": 32},
    "granitemoeshared": {
        **WIDE,
        **GRANITE_NUMBERS,
        "intermediate_size": 104,
        "model_type": "granitemoeshared",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 56,
    },
    "gpt_oss": {**BASE, "model_type": "gpt_oss", "sliding_window": 8, "layer_types": SLIDING, "num_local_experts": 4},
    "llama4": {
        **BASE,
        "model_type": "llama4_text",
        "attention_chunk_size": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 60,
    },
    "gpt_neox": {**WIDE, "model_type": "gpt_neox"},
    "gpt_neox_serial": {**WIDE, "model_type": "gpt_neox", "use_parallel_residual": False},
    "phi": {**WIDE, "model_type": "phi", "partial_rotary_factor": 0.5},
    "phi_qk_norms": {**WIDE, "model_type": "phi", "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "gpt2": {"model_type": "gpt2", "vocab_size": VOCAB_SIZE, "n_embd": 128, "n_layer": 3, "n_head": 2},
}
NATIVE = (
    *("llama", "llama_1000", "llama_tied", "llama3_rope", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3"),
    *("phi3", "phi3_longrope", "olmo2", "olmo3", "granite", "smollm3", "exaone4", "seed_oss", "glm4", "ernie4_5"),
    *("cohere", "cohere2", "starcoder2", "stablelm", "gpt_neox", "gpt_neox_serial", "phi", "phi_qk_norms"),
)
STEPWISE = (  # fused, but not one native call
    *("mixtral", "qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2", "granitemoeshared"),
)
FUSED = (*NATIVE, *STEPWISE)
CLAIMED = (
    *("llama", "llama_1000", "llama_tied", "llama3_rope", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "olmo2"),
    *("gpt2", "gpt_neox", "starcoder2"),
)


def plain_tree(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """transformers' own tree with its own eager attention and masks."""
    tree = build.build_tree(load_config(CONFIGS[name]), dtype, "eager")
    draw_weights(tree)
    return tree


def paged_backbone(
    name: str,
    backend: AttentionBackend,
    way: Way = "swapped",
    dtype: torch.dtype = torch.float32,
    *,
    join: bool = True,
) -> Backbone:
    """The same weights over our attention: in transformers' modules, in those with ours swapped in, or fused."""
    attention_hook.register()
    config = load_config(CONFIGS[name])
    check_config(config, model_class(config))
    tree = build.build_tree(config, dtype, attention_hook.IMPLEMENTATION)
    build.assign_weights(tree, plain_tree(name, dtype).state_dict().items(), dtype)
    if way == "plain":
        return Backbone(TreeModel(tree, backend), batch_invariant=False, num_parameters=0)
    return prepare(tree, backend, 1024, fuse=way == "fused", join=join)


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
