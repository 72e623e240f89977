"""A mixture of experts: the same rows give the same bits whoever stands beside them, and its weights are found however
they are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.config import Quantization
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.fused_experts import ExpertTensors, route
from engine.models.fused_recipe import ExpertsRecipe
from engine.models.quantiser import Quantiser
from engine.models.self_check import PagedRun
from tests.engine.recipes import EXPERTS, MAX_POSITIONS, VOCAB_SIZE, NothingStored, draw_tensors
from tests.engine.tiny_configs import relative, tokens


def logits(tensors: dict[str, Tensor], quantization: Quantization = "none") -> Tensor:
    quantiser = Quantiser(quantization, NothingStored(), ExpertTensors(tensors))
    model = FusedModel(EXPERTS, tensors, NativeAttention(), MAX_POSITIONS, quantiser)
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


def as_mixtral_has_them(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    names = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    result = {}
    for name, tensor in tensors.items():
        for ours, theirs in names.items() if ".mlp." in name else ():
            name = name.replace(ours, theirs)
        result[name] = tensor
    return result


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_weights_are_found_under_every_name(quantization: Quantization) -> None:
    tensors = draw_tensors(EXPERTS, torch.bfloat16)
    expected = logits(tensors, quantization)
    assert float(expected.std()) > 0.1
    for others in (joined(tensors), as_mixtral_has_them(tensors)):
        assert torch.equal(logits(others, quantization), expected)


def test_which_checkpoints_fit() -> None:
    tensors = draw_tensors(EXPERTS, torch.float32)
    assert EXPERTS.fits(tensors)
    assert EXPERTS.fits(as_mixtral_has_them(tensors))
    assert not EXPERTS.fits(joined(tensors))  # transformers' own layout: read through its tree
    for name in tensors:
        assert not EXPERTS.fits(tensors.keys() - {name})


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
