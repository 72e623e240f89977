"""The backbone over paged caches against transformers' own forward, and what happens around a forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.config import StartError
from engine.models import attention_hook, build
from engine.models.allow import check_config, expected_lookback, load_config, max_exact_position, model_class
from engine.models.backbone import Backbone
from engine.models.prepare import prepare
from engine.models.self_check import PagedRun
from engine.models.shrink import draw_weights
from engine.models.source import resolve_source
from engine.models.tree import TreeModel, record_calls, resolve_specs
from engine.models.weights import open_weights
from tests.engine.tiny_configs import (
    CLAIMED,
    CONFIGS,
    paged_backbone,
    plain_logits,
    plain_tree,
    relative,
    tokens,
)
from tests.models import MODELS, model_file

NUM_TOKENS = 41  # five windows of eight and one
BACKENDS: dict[str, type[ReferenceAttention] | type[NativeAttention]] = {
    "reference": ReferenceAttention,
    "native": NativeAttention,
}


def in_chunks(backbone: Backbone, ids: list[int], size: int) -> Tensor:
    run = PagedRun(backbone, 64)
    return torch.cat([run.step([(0, ids[start : start + size])])[0] for start in range(0, len(ids), size)])


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_chunks_over_the_paged_cache_equal_one_plain_forward(name: str, backend: str) -> None:
    ids = tokens(NUM_TOKENS)
    expected = plain_logits(plain_tree(name), ids)
    got = in_chunks(paged_backbone(name, BACKENDS[backend]()), ids, 5)
    assert got.dtype == torch.float32
    assert relative(got, expected) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_a_mixed_step_keeps_sequences_apart(name: str) -> None:
    backbone = paged_backbone(name, NativeAttention())
    tree = plain_tree(name)
    prompts = {sequence: tokens(length, seed=sequence) for sequence, length in enumerate((30, 1, 17, 16))}
    run = PagedRun(backbone, 64)
    run.step([(0, prompts[0][:20])])
    pieces = [(0, prompts[0][20:]), (1, prompts[1]), (2, prompts[2]), (3, prompts[3])]
    for (sequence, piece), logits in zip(pieces, run.step(pieces), strict=True):
        assert relative(logits, plain_logits(tree, prompts[sequence])[-len(piece) :]) < 1e-5


def test_losing_the_window_would_be_seen() -> None:
    backbone = paged_backbone("mistral", ReferenceAttention(), "plain")
    ids = tokens(NUM_TOKENS)
    for layer in backbone.layers:
        layer.spec = replace(layer.spec, window=None)
    assert relative(in_chunks(backbone, ids, 5), plain_logits(plain_tree("mistral"), ids)) > 1e-2


def test_layers_report_how_they_look_back() -> None:
    gemma = paged_backbone("gemma2", ReferenceAttention(), "plain")
    assert [(layer.spec.window, layer.spec.softcap) for layer in gemma.layers] == [(8, 50.0), (None, 50.0), (8, 50.0)]
    sinks = paged_backbone("gpt_oss", ReferenceAttention(), "plain")
    assert all(layer.spec.has_sinks for layer in sinks.layers)
    chunked = paged_backbone("llama4", ReferenceAttention(), "plain")
    assert [layer.spec.chunk for layer in chunked.layers] == [8, 8, 8]


def test_only_the_wanted_rows_get_logits() -> None:
    backbone = paged_backbone("llama", ReferenceAttention())
    ids = tokens(9)
    run = PagedRun(backbone)
    full = run.step([(0, ids)])[0]
    run = PagedRun(backbone)
    metadata = run.metadata_for([(0, ids)])
    inputs = torch.tensor(ids), torch.arange(9)
    assert torch.equal(backbone.forward(*inputs, metadata, torch.tensor([8, 2])), full[[8, 2]])
    assert backbone.forward(*inputs, metadata, torch.empty(0, dtype=torch.int64)).shape == (0, backbone.vocab_size)


def test_metadata_is_gone_after_a_forward_and_after_a_failed_one() -> None:
    class Failing(ReferenceAttention):
        def forward(self, *args: object, **kwargs: object) -> Tensor:
            assert all(layer.metadata is not None for layer in backbone.layers)
            raise RuntimeError("no")

    backbone = paged_backbone("llama", Failing(), "plain")
    with pytest.raises(RuntimeError, match="no"):
        PagedRun(backbone).step([(0, [1, 2])])
    assert all(layer.metadata is None for layer in backbone.layers)
    good = paged_backbone("llama", ReferenceAttention(), "plain")
    PagedRun(good).step([(0, [1, 2])])
    assert all(layer.metadata is None for layer in good.layers)


def test_two_backbones_interleave_in_one_process() -> None:
    ids = tokens(24)
    alone = {name: in_chunks(paged_backbone(name, ReferenceAttention()), ids, 6) for name in ("llama", "gemma3")}
    backbones = {name: paged_backbone(name, ReferenceAttention()) for name in alone}
    runs = {name: PagedRun(backbone) for name, backbone in backbones.items()}
    parts: dict[str, list[Tensor]] = {name: [] for name in alone}
    for start in range(0, 24, 6):
        for name, run in runs.items():
            parts[name].append(run.step([(0, ids[start : start + 6])])[0])
    for name, expected in alone.items():
        assert torch.equal(torch.cat(parts[name]), expected)


def test_a_module_that_attends_twice_has_two_caches() -> None:
    config = load_config(
        {
            "model_type": "hrm_text",
            "vocab_size": 131,
            "hidden_size": 64,
            "intermediate_size": 60,
            "num_hidden_layers": 2,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "pad_token_id": None,
        }
    )
    tree = build.build_tree(config, torch.float32, "eager")
    draw_weights(tree)
    ids = tokens(20)
    expected = plain_logits(tree, ids)
    attention_hook.register()
    attention_hook.select_implementation(tree, attention_hook.IMPLEMENTATION)
    backbone = Backbone(TreeModel(tree, ReferenceAttention()), batch_invariant=False, num_parameters=0)
    modules = {
        id(module)
        for module in tree.modules()
        if isinstance(getattr(module, "paged_layer", None), attention_hook.PagedCalls)
    }
    assert len(backbone.layers) > len(modules)
    assert relative(in_chunks(backbone, ids, 5), expected) < 1e-5


def allowed(values: dict[str, Any]) -> None:
    config = load_config(values)
    check_config(config, model_class(config))


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("bart", "encoder-decoder"),
        ("mamba", "recurrent state"),
        ("jamba", "recurrent state"),
        ("bloom", "does not let its attention be replaced"),
        ("minimax", "linear_attention"),
        ("vit", "no causal language model"),
        ("no_such_type", "not one this version of transformers knows"),
    ],
)
def test_refused_with_a_reason(model_type: str, reason: str) -> None:
    with pytest.raises(StartError, match=reason) as caught:
        allowed({"model_type": model_type})
    assert "\n" not in str(caught.value)


def test_an_encoder_is_refused_by_its_attention() -> None:
    attention_hook.register()
    config = load_config({"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1})
    tree = build.build_tree(config, torch.float32, attention_hook.IMPLEMENTATION)
    with pytest.raises(StartError, match="not causal"):
        record_calls(tree)


def test_convolutions_beside_attention_are_refused() -> None:
    attention_hook.register()
    values = {**CONFIGS["llama"], "model_type": "lfm2", "layer_types": ["conv", "full_attention", "conv"]}
    with pytest.raises(StartError, match="conv"):
        allowed(values)


def test_a_report_that_contradicts_the_config_is_refused() -> None:
    attention_hook.register()
    config = load_config(CONFIGS["mistral"])
    tree = build.build_tree(config, torch.float32, attention_hook.IMPLEMENTATION)
    recorded = record_calls(tree)
    config.sliding_window = 16
    with pytest.raises(StartError, match="window of 8"):
        resolve_specs(config, recorded)


def test_lookback_follows_layer_types() -> None:
    assert expected_lookback(load_config(CONFIGS["gemma3"]), 3) == [(8, None), (None, None), (8, None)]
    assert expected_lookback(load_config(CONFIGS["llama"]), 3) == [(None, None)] * 3


def test_context_ends_where_rotation_would_change() -> None:
    factors = [1.0] * 32
    longrope = {
        **CONFIGS["phi3"],
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": 256,
        },
    }
    assert max_exact_position(load_config(longrope)) == 256
    assert max_exact_position(load_config(CONFIGS["llama"])) == 1024


def test_no_buffer_is_left_without_values() -> None:
    tree = build.build_tree(load_config(CONFIGS["gemma3"]), torch.bfloat16, "eager")
    buffers = dict(tree.named_buffers())
    assert float(buffers["model.embed_tokens.embed_scale"]) == pytest.approx(60**0.5, rel=1e-2)
    frequencies = buffers["model.rotary_emb.full_attention_inv_freq"]
    assert frequencies.dtype == torch.float32
    assert float(frequencies[0]) == 1.0


@pytest.mark.model
@pytest.mark.parametrize("way", ["swapped", "fused"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_greedy_tokens_equal_generate(name: str, way: str) -> None:
    """A paged loop over real weights, one prompt of Gemma's past its window; the engine's own matrix is elsewhere."""
    weights = open_weights(resolve_source(str(model_file(name))))
    config = load_config(weights.hf_config)
    plain = build.build_tree(config, torch.float32, "eager")
    build.assign_weights(plain, weights.tensors(torch.float32), torch.float32)
    attention_hook.register()
    tree = build.build_tree(load_config(weights.hf_config), torch.float32, attention_hook.IMPLEMENTATION)
    build.assign_weights(tree, weights.tensors(torch.float32), torch.float32)
    backbone = prepare(tree, NativeAttention(), 1024, fuse=way == "fused")
    prompts = [tokens(5, 1, 30_000), tokens(17, 2, 30_000), tokens(530, 3, 30_000)]
    expected = [
        plain.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0)[0]
        for ids in prompts
    ]
    run = PagedRun(backbone, 64)
    fed = [list(ids) for ids in prompts]
    outputs: list[list[int]] = [[] for _ in prompts]
    while any(fed):
        pieces = [(sequence, ids[:256]) for sequence, ids in enumerate(fed) if ids]
        fed = [ids[256:] for ids in fed]
        for (sequence, _), logits in zip(pieces, run.step(pieces), strict=True):
            if not fed[sequence] and len(outputs[sequence]) < 16:
                outputs[sequence].append(int(logits[-1].argmax()))
                fed[sequence] = [outputs[sequence][-1]] if len(outputs[sequence]) < 16 else []
    for ids, output, whole in zip(prompts, outputs, expected, strict=True):
        assert output == whole[len(ids) :].tolist()


def test_claims_match_what_was_swapped() -> None:
    for name in CONFIGS:
        backbone = paged_backbone(name, NativeAttention())
        if name in CLAIMED:
            assert backbone.batch_invariant, name
    assert not paged_backbone("mixtral", NativeAttention()).batch_invariant


@pytest.mark.parametrize("name", ["flash-attn", "torch-varlen"])
def test_no_claim_with_a_library_s_attention(name: str) -> None:
    class Library(NativeAttention):
        pass

    Library.name = name
    for way in ("swapped", "fused"):
        assert not paged_backbone("llama", Library(), way).batch_invariant
        assert paged_backbone("llama", NativeAttention(), way).batch_invariant
