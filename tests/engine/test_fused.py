"""The fused decoder: equal to transformers where it claims a model, silent where it does not, free of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.config import DeviceConfig, ModelConfig, StartError
from engine.models import attention_hook
from engine.models.allow import load_config
from engine.models.backbone import Backbone
from engine.models.fused import EMBEDDING, FusedModel, FusedRecipe
from engine.models.loader import load_model
from engine.models.prepare import NoRecipe, recipe_of
from engine.models.self_check import PagedRun, check_in_small
from engine.models.tree import TreeModel
from tests.engine.tiny_configs import CONFIGS, FUSED, paged_backbone, plain_logits, plain_tree, relative, tokens
from tests.tiny import VOCAB_SIZE, tiny_folder


@pytest.fixture(autouse=True)
def hook() -> None:
    attention_hook.register()


def recipe(name: str) -> FusedRecipe:
    tree = plain_tree(name)
    attention_hook.select_implementation(tree, attention_hook.IMPLEMENTATION)
    return recipe_of(tree)


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("backend", [ReferenceAttention, NativeAttention])
def test_it_computes_what_transformers_computes(name: str, backend: type[Any]) -> None:
    ids = tokens(41)
    run = PagedRun(paged_backbone(name, backend(), "fused"))
    got = torch.cat([run.step([(0, ids[start : start + 5])])[0] for start in range(0, len(ids), 5)])
    assert relative(got, plain_logits(plain_tree(name), ids)) < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_in_bfloat16_it_rounds_where_the_swapped_tree_rounds(name: str) -> None:
    ids = tokens(33)
    ways = [paged_backbone(name, NativeAttention(), way, torch.bfloat16) for way in ("swapped", "fused")]
    swapped, fused = (PagedRun(backbone).step([(0, ids)])[0] for backbone in ways)
    assert torch.equal(swapped, fused)


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "mixtral", "phi3", "olmo2", "gpt_oss", "llama4"])
def test_other_structures_have_no_recipe(name: str) -> None:
    with pytest.raises(NoRecipe):
        recipe(name)


@pytest.mark.parametrize("name", ["granite", "gemma2"])
def test_what_happens_between_modules_is_caught_by_the_self_check(name: str) -> None:
    """Structure fits, but residuals or embeddings are scaled outside any module."""
    assert recipe(name)
    config = load_config(CONFIGS[name])
    with pytest.raises(StartError, match="computes something else"):
        check_in_small(config, NativeAttention(), fuse=True)
    assert check_in_small(config, NativeAttention(), fuse=False).batch_invariant


@pytest.mark.parametrize("name", FUSED)
def test_a_recipe_survives_json(name: str) -> None:
    made = recipe(name)
    assert FusedRecipe.from_json(json.loads(json.dumps(made.to_json()))) == made


def test_a_recipe_knows_the_tensors_it_needs() -> None:
    names = set(dict(plain_tree("gemma3").named_parameters()))
    made = recipe("gemma3")
    assert made.fits(names)
    for name in names:
        assert not made.fits(names - {name})
    assert not made.fits({f"language_model.{name}" for name in names})


def test_a_missing_tensor_is_a_sentence() -> None:
    tensors = {k: v for k, v in plain_tree("llama").named_parameters() if k != EMBEDDING}
    with pytest.raises(StartError, match=r"embed_tokens\.weight"):
        FusedModel(recipe("llama"), tensors, NativeAttention(), 64)


def test_a_wrong_recipe_gives_other_logits() -> None:
    """Or the comparisons above would prove nothing."""
    made, tree, ids = recipe("gemma3"), plain_tree("gemma3"), tokens(30)
    expected = plain_logits(tree, ids)
    wrong = [
        replace(made, scale=made.scale * 1.1),
        replace(made, activation="silu"),
        replace(made, embedding_scale=None),
        replace(made, layers=tuple(replace(layer, window=None) for layer in made.layers)),
        replace(made, ropes=made.ropes[::-1]),
    ]
    for one in wrong:
        model = FusedModel(one, dict(tree.named_parameters()), ReferenceAttention(), 64)
        got = PagedRun(Backbone(model, batch_invariant=False, num_parameters=0)).step([(0, ids)])[0]
        assert relative(got, expected) > 1e-3


SECOND_START = """
import sys
from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig
from engine.models.loader import load_model
model = load_model(
    ModelConfig(model=sys.argv[1], cache_dir=sys.argv[2], dtype="float32"), DeviceConfig(), backend=NativeAttention()
)
print(sorted(model.load_seconds), "transformers" in sys.modules)
"""


def test_a_later_start_imports_no_transformers(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SECOND_START, str(folder), str(tmp_path / "cache")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for _ in range(2)
    ]
    assert "self_check" in outputs[0]
    assert outputs[1].split() == ["['open',", "'pack',", "'tokenizer',", "'weights']", "False"]


def test_both_starts_compute_the_same_bits(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "gemma3_text")
    config = ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), dtype="bfloat16")
    ids = tokens(40, vocab_size=VOCAB_SIZE)
    models = [load_model(config, DeviceConfig(), backend=NativeAttention()) for _ in range(2)]
    first, second = (PagedRun(model.backbone).step([(0, ids)])[0] for model in models)
    assert torch.equal(first, second)
    assert models[0].backbone.num_parameters == models[1].backbone.num_parameters
    assert models[0].max_position == models[1].max_position == 1024
    assert models[1].backbone.batch_invariant


def test_never_checked_means_never_fused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    config = ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), dtype="float32", self_check="never")
    model = load_model(config, DeviceConfig(), backend=NativeAttention())
    assert isinstance(model.backbone.model, TreeModel)
