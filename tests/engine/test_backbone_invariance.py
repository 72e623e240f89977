"""Logits rows keep their bits: alone, beside others, in other chunks, with other thread counts.

Below the engine's own test of token ids: here every logit of every position is compared, on widths that no vector
divides."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.attention.native import NativeAttention
from engine.models import attention_hook, build
from engine.models.allow import load_config
from engine.models.backbone import Backbone
from engine.models.prepare import prepare
from engine.models.self_check import PagedRun
from engine.models.source import resolve_source
from engine.models.weights import open_weights
from tests.engine.tiny_configs import CLAIMED, FUSED, Way, paged_backbone, tokens
from tests.models import model_file

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTH = 77
NEIGHBOURS = (1, 6, 32, 63)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def alone(backbone: Backbone, ids: list[int], chunk: int) -> Tensor:
    run = PagedRun(backbone, 64)
    return torch.cat([run.step([(0, ids[start : start + chunk])])[0] for start in range(0, len(ids), chunk)])


def beside(backbone: Backbone, ids: list[int], count: int) -> Tensor:
    """In two pieces, `count` sequences of other lengths around it, the second piece beside decodes."""
    run = PagedRun(backbone, 64 * 3 + 32)
    others = [(sequence, tokens(1 + sequence * 7 % 23, sequence, 131)) for sequence in range(1, count + 1)]
    cut, before = len(ids) // 3, count // 2
    first = run.step([*others[:before], (0, ids[:cut]), *others[before:]])[before]
    decodes = [(sequence, [sequence]) for sequence, _ in others]
    second = run.step([(0, ids[cut:]), *decodes])[0]
    return torch.cat([first, second])


def check(backbone: Backbone, ids: list[int]) -> None:
    assert backbone.batch_invariant
    torch.set_num_threads(1)
    expected = alone(backbone, ids, len(ids))
    for chunk in (1, 16):
        assert torch.equal(alone(backbone, ids, chunk), expected), f"chunks of {chunk}"
    for count in NEIGHBOURS:
        assert torch.equal(beside(backbone, ids, count), expected), f"beside {count}"
    torch.set_num_threads(2)
    assert torch.equal(alone(backbone, ids, len(ids)), expected), "chunks, two threads"
    assert torch.equal(beside(backbone, ids, 32), expected), "beside 32, two threads"


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(("name", "way"), [*((n, "swapped") for n in CLAIMED), *((n, "fused") for n in FUSED)])
def test_tiny_models_of_odd_widths(name: str, way: Way, dtype: str) -> None:
    check(paged_backbone(name, NativeAttention(), way, DTYPES[dtype]), tokens(LENGTH))


def test_long_chunks_cross_the_attention_splits() -> None:
    backbone = paged_backbone("llama_1000", NativeAttention(), "fused", torch.bfloat16)
    ids = tokens(530)
    expected = alone(backbone, ids, 530)
    assert torch.equal(alone(backbone, ids, 512), expected)
    assert torch.equal(alone(backbone, ids, 16), expected)


def test_the_check_sees_a_tree_that_is_not_invariant() -> None:
    """torch's own linear layers change bits with the number of rows, or this file proves nothing."""
    backbone = paged_backbone("llama_1000", NativeAttention(), "plain")
    backbone.batch_invariant = True
    with pytest.raises(AssertionError, match=r"chunks|beside"):
        check(backbone, tokens(LENGTH))


@pytest.mark.model
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_real_models(name: str, dtype: str) -> None:
    attention_hook.register()
    weights = open_weights(resolve_source(str(model_file(name))))
    tree = build.build_tree(load_config(weights.hf_config), DTYPES[dtype], attention_hook.IMPLEMENTATION)
    build.assign_weights(tree, weights.tensors(DTYPES[dtype]), DTYPES[dtype])
    backbone = prepare(tree, NativeAttention(), 1024, fuse=True)
    ids = tokens(40, 1, 30_000)
    torch.set_num_threads(1)
    expected = alone(backbone, ids, len(ids))
    torch.set_num_threads(2)
    assert torch.equal(alone(backbone, ids, 16), expected)
    assert torch.equal(beside(backbone, ids, 32), expected)
