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
from torch import Tensor

from engine.attention.base import PagedLayer
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from engine.config import DeviceConfig, ModelConfig, StartError
from engine.models import attention_hook, prepare
from engine.models.allow import load_config
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.fused_parts import order_of_halves
from engine.models.fused_recipe import EMBEDDING, FusedRecipe
from engine.models.loader import load_model
from engine.models.prepare import NoRecipe, recipe_of
from engine.models.recipe import derive_recipe
from engine.models.self_check import PagedRun, check_in_small
from engine.models.served_size import served_bytes
from engine.models.tree import TreeModel
from tests.engine.recipes import MIXTURES, RECIPES, WIDE_NORMS, Stepwise, draw_tensors
from tests.engine.tiny_configs import (
    CONFIGS,
    FUSED,
    NATIVE,
    STEPWISE,
    Way,
    paged_backbone,
    plain_logits,
    plain_tree,
    relative,
    tokens,
)
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


class Recording(Stepwise):
    """Keeps what it is given, by layer. The native decoder's caches hold the same, to the bit: test_native_decoder."""

    def __init__(self) -> None:
        self.keys: dict[int, list[Tensor]] = {}
        self.values: dict[int, list[Tensor]] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, layer: PagedLayer, **options: Any) -> Tensor:
        self.keys.setdefault(layer.index, []).append(key.clone())
        self.values.setdefault(layer.index, []).append(value.clone())
        return super().forward(query, key, value, layer, **options)


@pytest.mark.parametrize("name", FUSED)
def test_keys_and_values_are_those_of_transformers(name: str) -> None:
    """Where transformers keeps only a window, its last ones."""
    ids, backend = tokens(41), Recording()
    run = PagedRun(paged_backbone(name, backend, "fused"))
    for start in range(0, len(ids), 5):
        run.step([(0, ids[start : start + 5])])
    made = recipe(name)
    rope = made.ropes[0]
    is_interleaved, rotary_dim = rope.is_interleaved, 2 * len(rope.inv_freq)
    with torch.inference_mode():
        cache = plain_tree(name)(input_ids=torch.tensor([ids]), use_cache=True).cache
    for index, layer in enumerate(cache.layers):
        for ours, theirs in ((backend.keys[index], layer.keys[0]), (backend.values[index], layer.values[0])):
            last = theirs.transpose(0, 1)  # [num_tokens, num_kv_heads, head_dim]
            assert len(last) >= 7
            seen = torch.cat(ours)[-len(last) :]
            if ours is backend.keys[index] and is_interleaved and made.layers[index].rope is not None:
                order = order_of_halves(1, last.shape[-1], rotary_dim)
                last = last[..., order]
            assert relative(seen, last) < 1e-5


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_the_way_each_family_takes(name: str) -> None:
    if name not in FUSED:
        with pytest.raises(StartError):
            check_in_small(load_config(CONFIGS[name]), NativeAttention(), fuse=True)
        return
    verdict = check_in_small(load_config(CONFIGS[name]), NativeAttention(), fuse=True)
    assert verdict.difference < 1e-5
    assert verdict.batch_invariant
    model = paged_backbone(name, NativeAttention(), "fused").model
    assert isinstance(model, FusedModel)
    assert (model.decoder is not None) == (name in NATIVE)


@pytest.mark.parametrize("name", FUSED)
def test_in_bfloat16_it_is_nearer_to_float32_than_the_swapped_tree(name: str) -> None:
    """Which rounds where transformers rounds; the fused decoder's residual stream is float32. Of a mixture the best
    quarter of the rows counts: where two experts are nearly equal, either way may choose otherwise."""
    prompts = [tokens(41, seed) for seed in range(1, 6 if name in STEPWISE else 2)]
    tree = plain_tree(name, torch.bfloat16).float()
    exact = torch.cat([plain_logits(tree, ids) for ids in prompts])
    ways: tuple[Way, ...] = ("swapped", "fused")
    runs = [PagedRun(paged_backbone(name, NativeAttention(), way, torch.bfloat16)) for way in ways]
    logits = [torch.cat([run.step([(index, ids)])[0] for index, ids in enumerate(prompts)]) for run in runs]
    rows = [(each - exact).square().mean(-1) for each in logits]
    swapped, fused = (float(row.quantile(0.25) if name in STEPWISE else row.mean()) for row in rows)
    assert 0 < fused < swapped


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss", "llama4"])
def test_other_structures_have_no_recipe(name: str) -> None:
    with pytest.raises(NoRecipe):
        recipe(name)


@pytest.mark.parametrize(
    "changed",
    [{"residual_scale": None}, {"logits_scale": None}, {"embedding_scale": None}, {"scale": 0.2}],
)
def test_what_happens_between_modules_is_caught_by_the_self_check(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were one of Granite's multipliers not found, modules alone would show nothing."""
    monkeypatch.setattr(prepare, "derive_recipe", lambda *args: replace(derive_recipe(*args), **changed))
    with pytest.raises(StartError, match="computes something else"):
        check_in_small(load_config(CONFIGS["granite"]), NativeAttention(), fuse=True)


@pytest.mark.parametrize("name", FUSED)
def test_a_recipe_survives_json(name: str) -> None:
    made = recipe(name)
    assert FusedRecipe.from_json(json.loads(json.dumps(made.to_json()))) == made


@pytest.mark.parametrize("name", NATIVE)
def test_a_recipe_knows_the_tensors_it_needs(name: str) -> None:
    names = set(dict(plain_tree(name).named_parameters()))
    made = recipe(name)
    assert made.fits(names)
    for one in names:
        assert made.fits(names - {one}) == one.endswith(".bias")
    assert not made.fits({f"language_model.{name}" for name in names})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*RECIPES, *MIXTURES])
def test_the_size_is_known_from_the_shapes(name: str, dtype: torch.dtype) -> None:
    one = (RECIPES | MIXTURES)[name]
    tensors = draw_tensors(one, dtype, biases=name in RECIPES, wide_norms=name in WIDE_NORMS)
    shapes = {tensor: tuple(value.shape) for tensor, value in tensors.items()}
    assert FusedModel(one, tensors, NativeAttention(), 64).weight_bytes == served_bytes(one, shapes, None, dtype)


@pytest.mark.parametrize("name", NATIVE)
def test_products_have_the_names_of_transformers_modules(name: str) -> None:
    """Under which adapters look for them."""
    tree = plain_tree(name)
    linears = {path for path, module in tree.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
    sites = paged_backbone(name, NativeAttention(), "fused").model.adapter_sites()
    assert {path for site in sites for path in site.paths} == linears


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
        replace(made, layers=tuple(replace(layer, rope=None) for layer in made.layers)),
        replace(made, residual_scale=0.5),
        replace(made, logits_scale=0.5),
        replace(made, logits_softcap=1.0),
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
    assert outputs[1].split() == ["['find',", "'open',", "'pack',", "'tokenizer',", "'weights']", "False"]


@pytest.mark.parametrize("kind", ["gemma3_text", "phi", "gpt_neox"])
def test_both_starts_compute_the_same_bits(kind: str, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    config = ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), dtype="bfloat16")
    ids = tokens(40, vocab_size=VOCAB_SIZE)
    models = [load_model(config, DeviceConfig(), backend=NativeAttention()) for _ in range(2)]
    first, second = (PagedRun(model.backbone).step([(0, ids)])[0] for model in models)
    assert torch.equal(first, second)
    assert models[0].backbone.num_parameters == models[1].backbone.num_parameters
    assert models[0].max_position == models[1].max_position == 1024
    assert models[1].backbone.batch_invariant
    assert "modelling_code" not in models[1].load_seconds


def test_never_checked_means_never_fused(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    config = ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), dtype="float32", self_check="never")
    model = load_model(config, DeviceConfig(), backend=NativeAttention())
    assert isinstance(model.backbone.model, TreeModel)
