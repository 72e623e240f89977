"""Tiny random-weight model folders, made on the spot: config.json, model.safetensors, tokenizer.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 320

# products of experts in bfloat16 want multiples of eight
_MIXTURE: dict[str, Any] = dict(
    hidden_size=96,
    intermediate_size=104,
    num_attention_heads=6,
    num_key_value_heads=2,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=40,
)

# widths 1000 and 60 on purpose: vectors do not divide them, so tails show
TINY: dict[str, dict[str, Any]] = {
    "llama": dict(hidden_size=1000, intermediate_size=60, num_attention_heads=10, num_key_value_heads=5, head_dim=20),
    "qwen2": dict(hidden_size=60, intermediate_size=1000, num_attention_heads=3, num_key_value_heads=3),
    "qwen3": dict(hidden_size=60, intermediate_size=100, num_attention_heads=6, num_key_value_heads=2, head_dim=16),
    "gemma3_text": dict(
        hidden_size=60,
        intermediate_size=100,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=64,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt_neox": dict(hidden_size=60, intermediate_size=100, num_attention_heads=3, tie_word_embeddings=False),
    "phi": dict(hidden_size=60, intermediate_size=100, num_attention_heads=3, partial_rotary_factor=0.5),
    "qwen2_moe": _MIXTURE | dict(shared_expert_intermediate_size=56),
    "glm4_moe": _MIXTURE | dict(n_routed_experts=4, n_shared_experts=1, first_k_dense_replace=1, head_dim=16),
    "ernie4_5_moe": _MIXTURE | dict(moe_num_experts=4, moe_k=2, moe_num_shared_experts=2),
    "minimax_m2": _MIXTURE | dict(num_local_experts=4, head_dim=16, rotary_dim=8),
}


def tiny_folder(parent: Path, kind: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a two-layer float32 model of `kind` (a key of TINY) and return its folder."""
    folder = parent / f"tiny-{kind}-{seed}"
    if folder.exists():
        return folder
    torch.manual_seed(seed)
    settings: dict[str, Any] = dict(
        vocab_size=VOCAB_SIZE,
        num_hidden_layers=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    settings |= TINY[kind] | overrides
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=torch.float32)
    with torch.no_grad():  # the default init is so flat that attention hardly matters
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                scale = 2.0 if "embed" in name else 1.5  # tied logits then spread by 2: sampling has a choice
                parameter.normal_(0.0, scale / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.normal_(0.0, 0.2)
    model.save_pretrained(folder, safe_serialization=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> Tokenizer:
    """Byte-level, no merges: every byte is a token; ids 0-2 are <pad>, <s>, </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<pad>": 0, "<s>": 1, "</s>": 2} | {c: i + 3 for i, c in enumerate(alphabet)}
    vocab |= {f"<unused{i}>": i for i in range(len(vocab), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer
