"""A mixture of experts: the same rows give the same bits whoever stands beside them, and its weights are found however
they are stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig, Quantization, StartError
from engine.models import attention_hook, prepare
from engine.models.allow import load_config
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.fused_experts import route, sigmoid
from engine.models.fused_recipe import CORRECTION, ExpertsRecipe, FusedRecipe
from engine.models.loader import load_model
from engine.models.quantiser import Quantiser
from engine.models.recipe import derive_recipe
from engine.models.self_check import PagedRun, check_in_small, keeps_bits
from engine.models.source import resolve_source
from engine.models.tensor_names import DIALECTS, NamedTensors, stored_name
from engine.models.weights import open_weights
from tests.engine.recipes import EXPERTS, MAX_POSITIONS, MIXTURES, VOCAB_SIZE, NothingStored, draw_tensors
from tests.engine.tiny_configs import CONFIGS, relative, tokens
from tests.tiny import VOCAB_SIZE as TINY_VOCAB_SIZE
from tests.tiny import tiny_folder


def logits(tensors: dict[str, Tensor], quantization: Quantization = "none", recipe: FusedRecipe = EXPERTS) -> Tensor:
    quantiser = Quantiser(quantization, NothingStored(), NamedTensors(tensors))
    model = FusedModel(recipe, tensors, NativeAttention(), MAX_POSITIONS, quantiser)
    assert model.decoder is None
    run = PagedRun(Backbone(model, batch_invariant=True, num_parameters=0), num_blocks=40)
    return run.step([(0, tokens(37, vocab_size=VOCAB_SIZE))])[0]


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a tree of transformers has them: all experts of a layer in one tensor."""
    result = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for index in range(len(EXPERTS.layers)):
        path = f"model.layers.{index}.mlp.experts"
        parts = [[tensors[f"{path}.{e}.{part}_proj.weight"] for e in range(8)] for part in ("gate", "up", "down")]
        gate, up, down = (torch.stack(part) for part in parts)
        result |= {f"{path}.gate_up_proj": torch.cat([gate, up], 1), f"{path}.down_proj": down}
    return result


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_are_found_under_every_name(quantization: Quantization) -> None:
    tensors = draw_tensors(EXPERTS, torch.bfloat16)
    expected = logits(tensors, quantization)
    assert float(expected.std()) > 0.1
    for others in (joined(tensors), *in_every_dialect(tensors)):
        assert torch.equal(logits(others, quantization), expected)


def in_every_dialect(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{dialect.theirs(name): tensor for name, tensor in tensors.items()} for dialect in DIALECTS]


def test_names_as_checkpoints_have_them() -> None:
    expert = "model.layers.3.mlp.experts.12.up_proj.weight"
    shared = "model.layers.3.mlp.shared_experts.down_proj.weight"
    correction = f"model.layers.3.{CORRECTION}"
    for ours, theirs in (
        (expert, "model.layers.3.block_sparse_moe.experts.12.w3.weight"),
        (shared, "model.layers.3.mlp.shared_expert.down_proj.weight"),
        (shared, "model.layers.3.shared_mlp.output_linear.weight"),
        (correction, "model.layers.3.block_sparse_moe.e_score_correction_bias"),
        (correction, "model.layers.3.mlp.moe_statics.e_score_correction_bias"),
    ):
        assert stored_name(ours, {theirs, "others"}) == theirs
        assert stored_name(ours, {"others"}) is None


@pytest.mark.parametrize("name", MIXTURES)
def test_which_checkpoints_fit(name: str) -> None:
    tensors = draw_tensors(MIXTURES[name], torch.float32)
    for others in in_every_dialect(tensors):
        assert MIXTURES[name].fits(others)
    for one in tensors:
        assert not MIXTURES[name].fits(tensors.keys() - {one})
    if name == "experts":
        assert not EXPERTS.fits(joined(tensors))  # transformers' own layout: read through its tree


@pytest.mark.parametrize("name", MIXTURES)
def test_every_part_of_a_mixture_counts(name: str) -> None:
    """Experts that no row chose apart."""
    tensors = draw_tensors(MIXTURES[name], torch.float32)
    expected = logits(tensors, recipe=MIXTURES[name])
    last = {part: tensor for part, tensor in tensors.items() if part.startswith("model.layers.2.mlp")}
    idle = set()
    for part, tensor in last.items():
        if torch.equal(logits(tensors | {part: tensor.roll(1, -1) * 3}, recipe=MIXTURES[name]), expected):
            idle.add(part.rpartition(".experts.")[2].partition(".")[0] if ".experts." in part else part)
    assert len(idle) < 4
    assert idle <= set("01234567")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MIXTURES)
def test_rows_keep_their_bits(name: str, dtype: torch.dtype) -> None:
    model = FusedModel(MIXTURES[name], draw_tensors(MIXTURES[name], dtype), NativeAttention(), MAX_POSITIONS)
    assert keeps_bits(Backbone(model, batch_invariant=True, num_parameters=0))


def test_a_sigmoid_s_bits_do_not_depend_on_its_place() -> None:
    for width in (1, 13, 128):
        x = torch.randn(300, width, generator=torch.Generator().manual_seed(4)) * 3
        whole = sigmoid(x)
        torch.testing.assert_close(whole, x.sigmoid())
        for start in range(1, 40):
            assert torch.equal(sigmoid(x[start : start + 7]), whole[start : start + 7])


def test_a_sigmoid_of_large_numbers() -> None:
    x = torch.tensor([[1e4, -1e4, 0.0, 50.0, -50.0, 1.0], [-1e30, -1e30, -80.0, -90.0, -100.0, -64.0]])
    torch.testing.assert_close(sigmoid(x), x.sigmoid())


def test_quantised_experts_are_near_the_exact_ones() -> None:
    tensors = draw_tensors(EXPERTS, torch.float32)
    difference = relative(logits(tensors, "int8"), logits(tensors))
    assert 1e-4 < difference < 0.2


@pytest.mark.parametrize("is_normalised", [True, False])
def test_routing_against_torch(is_normalised: bool) -> None:
    drawn = torch.randn(33, 16, generator=torch.Generator().manual_seed(2))
    weights, experts = route(drawn, ExpertsRecipe(16, 4, is_normalised))
    shares = drawn.softmax(-1)
    best = shares.sort(-1, descending=True)
    assert torch.equal(experts, best.indices[:, :4])
    wanted = best.values[:, :4]
    torch.testing.assert_close(weights, wanted / wanted.sum(-1, keepdim=True) if is_normalised else wanted)
    for row in range(33):
        alone = route(drawn[row : row + 1], ExpertsRecipe(16, 4, is_normalised))
        assert torch.equal(alone[0], weights[row : row + 1])


def test_corrections_choose_and_do_not_weigh() -> None:
    drawn = torch.randn(33, 16, generator=torch.Generator().manual_seed(2))
    correction = torch.linspace(3, 0, 16)  # larger than any score: the first four win
    recipe = ExpertsRecipe(16, 4, False, "sigmoid", 2.5, has_correction=True)
    weights, experts = route(drawn, recipe, correction)
    assert experts.max() < 8
    torch.testing.assert_close(weights, 2.5 * drawn.sigmoid().gather(1, experts))


@pytest.mark.parametrize(
    "changed",
    [
        {"scaling": 1.6},
        {"scores": "softmax"},
        {"is_normalised": False},
        {"has_correction": False},
        {"shared": None},
    ],
)
def test_what_is_wrongly_told_of_a_mixture_does_not_pass(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*args: Any) -> FusedRecipe:
        made = derive_recipe(*args)
        assert made is not None
        assert made.experts is not None
        return replace(made, experts=replace(made.experts, **changed))

    attention_hook.register()
    monkeypatch.setattr(prepare, "derive_recipe", wrong)
    with pytest.raises(StartError, match="computes something else"):
        check_in_small(load_config(CONFIGS["glm4_moe"]), NativeAttention(), fuse=True)


@pytest.mark.parametrize("model_type", ["dots1", "granitemoe", "flex_olmo"])
def test_more_families_pass(model_type: str) -> None:
    attention_hook.register()
    values = {**CONFIGS["glm4_moe"], "model_type": model_type, "num_local_experts": 4}
    verdict = check_in_small(load_config(values), NativeAttention(), fuse=True)
    assert verdict.difference < 1e-5
    assert verdict.batch_invariant


@pytest.mark.parametrize("kind", ["qwen2_moe", "glm4_moe", "ernie4_5_moe", "minimax_m2"])
def test_a_later_start_reads_the_checkpoint(kind: str, tmp_path: Path) -> None:
    """To the bits of the first, which reads transformers' tree."""
    folder = tiny_folder(tmp_path, kind)
    config = ModelConfig(model=str(folder), cache_dir=str(tmp_path / "cache"), dtype="bfloat16")
    models = [load_model(config, DeviceConfig(), backend=NativeAttention()) for _ in range(2)]
    assert "self_check" in models[0].load_seconds
    assert "modelling_code" not in models[1].load_seconds
    ids = tokens(40, vocab_size=TINY_VOCAB_SIZE)
    first, second = (PagedRun(model.backbone).step([(0, ids)])[0] for model in models)
    assert torch.equal(first, second)
    assert models[1].backbone.batch_invariant


def test_what_chooses_is_read_in_full(tmp_path: Path) -> None:
    """Beside a correction of a hundred, bfloat16 leaves no score."""
    folder = tiny_folder(tmp_path, "glm4_moe")
    weights = open_weights(resolve_source(str(folder)))
    name = f"model.layers.1.{CORRECTION}"
    for tensors in (dict(weights.tensors(torch.bfloat16)), weights.streamed(torch.bfloat16)):
        assert tensors[name].dtype == torch.float32
        assert tensors["model.layers.1.mlp.gate.weight"].dtype == torch.float32
        assert tensors["model.layers.0.mlp.gate_proj.weight"].dtype == torch.bfloat16
