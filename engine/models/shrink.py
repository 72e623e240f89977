"""A model's config made tiny: same layer kinds and head shape, narrow and short, windows of a few tokens.

A few tokens through the real model cannot show a lost window; through this one they can.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.config import StartError
from engine.models.allow import one_line
from engine.models.build import fill_dummy

WINDOW = 8  # tokens
MAX_LAYERS = 8
VOCAB_SIZE = 131  # no multiple of any vector width, so that array tails are met
# Canonical attribute -> tiny value, where the config has it and it is larger.
LIMITS = {
    "intermediate_size": 60,
    "intermediate_size_mlp": 60,
    "ffn_dim": 60,
    "n_inner": 60,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 28,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def shrunk_config(config: Any, *, keep_width: bool = False) -> Any:
    """A copy of `config` with few layers of every kind it has and windows of WINDOW tokens.

    keep_width: leave widths and head counts (for configs whose sizes hang together in ways unknown to us).
    Raises StartError if transformers will not build such a config."""
    values: dict[str, Any] = config.to_dict()
    names: dict[str, str] = getattr(config, "attribute_map", None) or {}

    def key(canonical: str) -> str:
        return names.get(canonical, canonical)

    def put(canonical: str, value: Any) -> None:
        if values.get(key(canonical)) is not None:
            values[key(canonical)] = value

    _cut_layers(values, config, key("num_hidden_layers"))
    for canonical in ("sliding_window", "attention_chunk_size"):
        put(canonical, WINDOW)
    put("vocab_size", VOCAB_SIZE)
    for token in ("pad_token_id", "bos_token_id", "eos_token_id"):
        values[token] = None
    if not keep_width:
        for canonical, limit in LIMITS.items():
            value = values.get(key(canonical))
            if isinstance(value, int) and value > limit:
                values[key(canonical)] = limit
        for canonical, value in _heads(values, config).items():
            put(canonical, value)
    values.pop("_name_or_path", None)
    try:
        return type(config).from_dict(values)
    except Exception as error:  # config classes validate themselves and raise kinds of their own
        raise StartError(f"Model type {config.model_type!r} cannot be checked in small: {one_line(error)}.") from error


def _cut_layers(values: dict[str, Any], config: Any, layers_key: str) -> None:
    """Keep the shortest run of first layers that shows every kind of layer, two at least and MAX_LAYERS at most.

    A layer's kind is what all the lists with an entry per layer say about it."""
    total = int(config.num_hidden_layers)
    per_layer = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == total}
    kinds = [repr(kind) for kind in zip(*per_layer.values(), strict=True)]
    keep = min(total, 2)
    while keep < min(total, MAX_LAYERS) and set(kinds[:keep]) != set(kinds):
        keep += 1
    for name, value in per_layer.items():
        values[name] = value[:keep]
    values[layers_key] = keep


def _heads(values: dict[str, Any], config: Any) -> dict[str, int]:
    """Head counts and hidden size: the real head size and group size, two KV heads at most."""
    query_heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or query_heads)
    small_kv = min(2, kv_heads)
    small_query = small_kv * (query_heads // kv_heads)
    head_dim = values.get("head_dim")
    width = 16 if head_dim is not None else int(config.hidden_size) // query_heads
    hidden = width * small_query
    return {
        "num_attention_heads": small_query,
        "num_key_value_heads": small_kv,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
    }


def draw_weights(tree: nn.Module, seed: int = 7) -> None:
    """Random weights under which attention, norms and experts all move the logits; likewise buffers of checkpoints."""
    fill_dummy(tree, seed)
    generator = torch.Generator().manual_seed(seed)
    persistent = tree.state_dict(keep_vars=True).keys()
    buffers = [buffer for name, buffer in tree.named_buffers() if name in persistent and buffer.is_floating_point()]
    for parameter in (*tree.parameters(), *buffers):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() >= 2:
            parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        else:
            parameter.add_(0.2 * noise)
