"""The two halves of a forward: hidden states behind the last norm, and logits of some of them."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from engine.attention.reference import ReferenceAttention
from tests.engine.test_backbone import PagedRun
from tests.engine.tiny_configs import CONFIGS, FUSED, Way, paged_backbone, plain_tree, relative, tokens

CASES = [(name, way) for name in CONFIGS for way in get_args(Way) if way != "fused" or name in FUSED]


def head_input(name: str, ids: list[int]) -> Tensor:
    """What transformers' own head sees, [num_tokens, hidden_size]."""
    tree = plain_tree(name)
    seen: list[Tensor] = []
    tree.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.inference_mode():
        tree(input_ids=torch.tensor([ids]), use_cache=False)
    return seen[0][0]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_hidden_states_are_what_the_head_sees(name: str, way: Way) -> None:
    backbone = paged_backbone(name, ReferenceAttention(), way)
    ids = tokens(21)
    inputs = torch.tensor(ids), torch.arange(21)
    run = PagedRun(backbone)
    hidden = backbone.hidden_states(*inputs, run.metadata_for([(0, ids)]))
    assert hidden.shape == (21, backbone.hidden_size)
    assert relative(hidden, head_input(name, ids)) < 1e-5
    wanted = torch.tensor([20, 3, 4])
    run = PagedRun(backbone)
    logits = backbone.forward(*inputs, run.metadata_for([(0, ids)]), wanted)
    halves = backbone.logits(hidden[wanted])
    assert halves.dtype == torch.float32
    if way == "plain":
        assert relative(halves, logits) < 1e-6
    else:
        assert torch.equal(halves, logits)
    assert backbone.logits(hidden[:0]).shape == (0, backbone.vocab_size)
    assert all(layer.metadata is None for layer in backbone.layers)
