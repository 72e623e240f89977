"""The self-check passes what is right, refuses what is wrong, and is not repeated without need."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from engine.attention.base import PagedLayer
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.config import StartError
from engine.models import allow, attention_hook, self_check
from engine.models.allow import load_config
from engine.models.fused_recipe import FusedRecipe
from engine.models.prepare import recipe_of
from engine.models.self_check import check_in_small, check_real, plain_logits
from engine.models.shrink import WINDOW, shrunk_config
from engine.models.swap import swap_modules
from engine.models.tree import TreeModel
from engine.models.verdict import Kept, Verdict, VerdictStore
from tests.engine.tiny_configs import CLAIMED, CONFIGS, paged_backbone, plain_tree

REAL_SIZE: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 640,
        "intermediate_size": 2048,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", "num_hidden_layers": 4, "vocab_size": 1000},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_hidden_layers": 4, "vocab_size": 1000},
}


class Forgetful(ReferenceAttention):
    """An attention backend with one thing wrong."""

    def __init__(self, forgets: str) -> None:
        self._forgets = forgets

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layer: PagedLayer, **options: Any) -> Tensor:
        return super().forward(query, key, value, layer, **{**options, self._forgets: None})


@pytest.fixture(autouse=True)
def hook() -> None:
    attention_hook.register()


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_every_family_we_serve_passes(name: str) -> None:
    verdict = check_in_small(load_config(CONFIGS[name]), NativeAttention(), fuse=False)
    assert verdict.difference < 1e-5 < 1e-2 < verdict.control
    if name in CLAIMED:
        assert verdict.batch_invariant


@pytest.mark.parametrize("name", sorted(REAL_SIZE))
def test_real_sizes_shrink(name: str) -> None:
    config = load_config(REAL_SIZE[name])
    small = shrunk_config(config)
    assert small.num_hidden_layers <= 6
    assert small.vocab_size < 200
    assert check_in_small(config, ReferenceAttention(), fuse=False).difference < 1e-5


def test_shrinking_keeps_every_kind_of_layer_and_the_head_shape() -> None:
    small = shrunk_config(load_config(REAL_SIZE["gemma3"]))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"}
    assert (small.head_dim, small.num_attention_heads, small.num_key_value_heads) == (256, 4, 1)
    assert small.sliding_window == WINDOW
    small = shrunk_config(load_config(REAL_SIZE["llama"]))
    assert small.head_dim == 64
    assert small.num_attention_heads // small.num_key_value_heads == 3


def test_every_kind_of_layer_stays_whatever_list_tells_it() -> None:
    """SmolLM3 leaves out rotation in every fourth layer, which layer_types does not say."""
    config = load_config({"model_type": "smollm3", "num_hidden_layers": 36, "vocab_size": 500, "pad_token_id": None})
    assert shrunk_config(config).no_rope_layers == [1, 1, 1, 0]
    assert check_in_small(config, ReferenceAttention(), fuse=False).difference < 1e-5
    assert check_in_small(config, ReferenceAttention(), fuse=True).difference < 1e-5


@pytest.mark.parametrize(
    ("name", "forgets"),
    [("mistral", "window"), ("gemma3", "window"), ("gemma2", "softcap"), ("gpt_oss", "sinks"), ("llama4", "chunk")],
)
def test_a_backend_that_forgets_something_is_caught(name: str, forgets: str) -> None:
    with pytest.raises(StartError, match="computes something else over the paged cache"):
        check_in_small(load_config(CONFIGS[name]), Forgetful(forgets), fuse=False)


@pytest.mark.parametrize("model_type", ["doge", "moshi"])
def test_models_known_to_go_wrong_silently_are_refused(model_type: str) -> None:
    with pytest.raises(StartError, match="refused"):
        check_in_small(load_config({"model_type": model_type}), ReferenceAttention(), fuse=False)


class Neighbourly(NativeAttention):
    """Right within rounding, but a row's bits depend on how many others there are."""

    def forward(self, query: Tensor, *args: Any, **options: Any) -> Tensor:
        return super().forward(query, *args, **options) * (1 + 1e-7 * query.shape[0])


def test_bits_that_change_beside_others_are_seen() -> None:
    assert check_in_small(load_config(CONFIGS["llama"]), NativeAttention(), fuse=False).batch_invariant
    assert not check_in_small(load_config(CONFIGS["llama"]), Neighbourly(), fuse=False).batch_invariant


def test_the_thread_count_is_left_as_it_was() -> None:
    before = torch.get_num_threads()
    check_in_small(load_config(CONFIGS["llama"]), ReferenceAttention(), fuse=False)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_weights_pass_and_wrong_ones_do_not(dtype: torch.dtype) -> None:
    expected = plain_logits(plain_tree("qwen3", dtype))
    backbone = paged_backbone("qwen3", NativeAttention(), dtype=dtype)
    check_real(backbone, expected)
    tree: Any = cast(TreeModel, backbone.model).tree
    assert all(layer.key_cache is None for layer in backbone.layers)
    with torch.inference_mode():
        tree.model.layers[1].mlp.down.packed.zero_()
    with pytest.raises(StartError, match="real weights"):
        check_real(backbone, expected)


def test_plain_logits_leave_the_hook_in_place() -> None:
    tree = plain_tree("llama")
    attention_hook.select_implementation(tree, attention_hook.IMPLEMENTATION)
    plain_logits(tree)
    assert tree.config._attn_implementation == attention_hook.IMPLEMENTATION
    swap_modules(tree, torch.float32, 64)


def a_recipe() -> FusedRecipe:
    tree = plain_tree("gemma3")
    attention_hook.select_implementation(tree, attention_hook.IMPLEMENTATION)
    return recipe_of(tree)


def test_verdicts_are_kept_per_everything_that_matters(tmp_path: Path) -> None:
    kept = Kept(Verdict(1e-7, 0.5, True), 1024, a_recipe())
    store = VerdictStore(str(tmp_path), "hash", torch.float32, "native")
    assert store.load() is None
    store.save(kept)
    assert VerdictStore(str(tmp_path), "hash", torch.float32, "native").load() == kept
    assert VerdictStore(str(tmp_path), "other", torch.float32, "native").load() is None
    assert VerdictStore(str(tmp_path), "hash", torch.bfloat16, "native").load() is None
    assert VerdictStore(str(tmp_path), "hash", torch.float32, "reference").load() is None


@pytest.mark.parametrize("damage", ['{"difference": 1e-7', "[]", '{"verdict": {}, "max_position": 1, "recipe": {}}'])
def test_a_damaged_verdict_counts_as_none(tmp_path: Path, damage: str) -> None:
    store = VerdictStore(str(tmp_path), "hash", torch.float32, "native")
    store.save(Kept(Verdict(1e-7, 0.5, True), 1024, None))
    for file in (tmp_path / "self_check").iterdir():
        file.write_text(damage)
    assert store.load() is None


def test_an_unwritable_cache_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "self_check").write_text("a file where the folder should be")
    store = VerdictStore(str(tmp_path), "hash", torch.float32, "native")
    store.save(Kept(Verdict(1e-7, 0.5, True), 1024, None))
    assert store.load() is None


def test_without_a_control_nothing_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_check, "MIN_CONTROL", 1e9)
    with pytest.raises(StartError, match="proves nothing"):
        check_in_small(load_config(CONFIGS["llama"]), ReferenceAttention(), fuse=False)


def test_scaling_by_position_is_seen_at_the_far_end() -> None:
    """Ministral 3 has Llama's parameter names and, past a threshold, scales its queries by position."""
    config = AutoConfig.for_model(
        "ministral3",
        vocab_size=131,
        hidden_size=64,
        intermediate_size=60,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 128,
        },
    )
    with pytest.raises(StartError, match="computes something else"):
        check_in_small(config, NativeAttention(), fuse=True)
    check_in_small(config, NativeAttention(), fuse=False)


def test_a_type_may_be_served_by_another_ones_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """As InternLM 3 is by Llama's."""
    monkeypatch.setitem(allow.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, "mistral", "LlamaForCausalLM")
    assert allow.model_class(load_config(CONFIGS["mistral"])).__module__ == "transformers.models.llama.modeling_llama"
