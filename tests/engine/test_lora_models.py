"""A model with adapters computes what the model with B A merged into its weights computes, on every way that models
take, and no row knows of its neighbours' adapters.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from engine import decoder_ops, ops
from engine.attention.native import NativeAttention
from engine.config import Quantization, StartError
from engine.models.backbone import Backbone
from engine.models.deltas import AdapterSpan, LowRank, joined
from engine.models.fused import FusedModel
from engine.models.lora import LayerShape, add_adapters
from engine.models.tree import TreeModel
from tests.engine.adapters import AdaptedRun, merge, shapes_of, write_adapter
from tests.engine.recipes import RECIPES, backbones, draw_tensors
from tests.engine.tiny_configs import Way, paged_backbone, plain_logits, plain_tree, relative, tokens

FUSED = (
    *("llama", "llama_tied", "qwen2", "gemma2", "phi3", "glm4", "cohere", "starcoder2", "stablelm", "qwen3_moe"),
    *("phi", "gpt_neox", "glm4_moe"),
)
SWAPPED = ("llama", "qwen2", "gemma3", "phi3", "gpt2", "gpt_neox", "cohere", "llama4")
CHUNK = 7
LENGTHS = (24, 1, 17, 30, 8, 19)
ADAPTERS = (0, 1, 2, 1, 0, 2)  # of as many sequences


def in_chunks(backbone: Backbone, prompts: Sequence[list[int]], adapters: Sequence[int]) -> list[Tensor]:
    """All sequences side by side, a chunk of each per step; logits [num_tokens, vocab] of each."""
    run = AdaptedRun(backbone, dict(enumerate(adapters)))
    parts: list[list[Tensor]] = [[] for _ in prompts]
    for start in range(0, max(map(len, prompts)), CHUNK):
        pieces = [(i, p[start : start + CHUNK]) for i, p in enumerate(prompts) if start < len(p)]
        for (index, _), logits in zip(pieces, run.step(pieces), strict=True):
            parts[index].append(logits)
    run.close()
    return [torch.cat(each) for each in parts]


def some(shapes: dict[str, LayerShape]) -> dict[str, LayerShape]:
    """Every other kind of layer."""
    names = sorted({path.rpartition(".")[2] for path in shapes})
    return {path: shape for path, shape in shapes.items() if path.rpartition(".")[2] in names[::2]}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "fused") for name in FUSED), *((name, "swapped") for name in SWAPPED)]
)
def test_equals_the_merged_model(name: str, way: Way, tmp_path: Path) -> None:
    backbone = paged_backbone(name, NativeAttention(), way, join=False)
    shapes = shapes_of(backbone)
    prompts = [tokens(length, seed) for seed, length in enumerate(LENGTHS)]
    base = in_chunks(backbone, prompts, [0] * len(prompts))
    num_bytes = backbone.weight_bytes
    adapters = [
        write_adapter(tmp_path / "all", shapes, seed=1),
        write_adapter(tmp_path / "some", some(shapes), seed=2, rank=3, alpha=5.0, dtype=torch.bfloat16),
    ]
    add_adapters(backbone, adapters)
    assert backbone.weight_bytes >= num_bytes + 4 * sum(4 * (s.in_features + s.out_features) for s in shapes.values())
    got = in_chunks(backbone, prompts, ADAPTERS)
    for place, ids in enumerate(prompts):
        tree = plain_tree(name)
        if ADAPTERS[place]:
            merge(tree, adapters[ADAPTERS[place] - 1])
        expected = plain_logits(tree, ids)
        assert relative(got[place], expected) < 2e-5
        if ADAPTERS[place]:
            assert relative(got[place], base[place]) > 0.05, "the adapter is felt"
        else:
            assert torch.equal(got[place], base[place])
        alone = in_chunks(backbone, [ids], [ADAPTERS[place]])[0]
        if backbone.batch_invariant:
            assert torch.equal(got[place], alone)


def draw_low_ranks(backbone: Backbone, dtype: torch.dtype) -> dict[int, dict[str, LowRank]]:
    """Of two adapters, the second without the first layer of each product."""
    generator = torch.Generator().manual_seed(9)
    drawn: dict[int, dict[str, LowRank]] = {}
    for adapter in (1, 2):
        for site in backbone.model.adapter_sites():
            names = site.paths[adapter == 2 and len(site.paths) > 1 :]
            for path, rows in zip(site.paths, site.rows, strict=True):
                if path in names:
                    a = torch.randn(3 + adapter, site.in_features, generator=generator) / site.in_features**0.5
                    b = torch.randn(rows, 3 + adapter, generator=generator) * 0.4
                    drawn.setdefault(adapter, {})[path] = LowRank(a.to(dtype), b.to(dtype))
    return drawn


def put(backbone: Backbone, drawn: dict[int, dict[str, LowRank]]) -> None:
    for adapter, parts in drawn.items():
        for site in backbone.model.adapter_sites():
            own = [parts.get(path) for path in site.paths]
            if any(part is not None for part in own):
                site.adapt(adapter, joined(site, own))
    backbone.model.finish_adapters(len(drawn))


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_rows_keep_their_bits_beside_all_others(name: str, dtype: torch.dtype, quantization: Quantization) -> None:
    tensors = draw_tensors(RECIPES[name], dtype, biases=True, wide_norms=name == "norms_behind")
    native, stepwise = backbones(RECIPES[name], tensors, quantization)
    prompts = [tokens(length, seed, RECIPES[name].vocab_size) for seed, length in enumerate(LENGTHS)]
    base = in_chunks(native, prompts, [0] * len(prompts))
    drawn = draw_low_ranks(native, dtype)
    for backbone in (native, stepwise):
        put(backbone, drawn)
    mixed = in_chunks(native, prompts, ADAPTERS)
    again = in_chunks(stepwise, prompts, ADAPTERS)
    for place, ids in enumerate(prompts):
        assert torch.equal(mixed[place], again[place])
        if ADAPTERS[place]:
            assert torch.equal(mixed[place], in_chunks(native, [ids], [ADAPTERS[place]])[0])
            assert relative(mixed[place], base[place]) > 0.02, "the adapter is felt"
        else:
            assert torch.equal(mixed[place], base[place])


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_decoder_with_adapters_is_one_with_other_weights(name: str) -> None:
    tensors = draw_tensors(RECIPES[name], torch.float32, biases=True, wide_norms=name == "norms_behind")
    backbone, _ = backbones(RECIPES[name], tensors)
    drawn = draw_low_ranks(backbone, torch.float32)
    put(backbone, drawn)
    prompts = [tokens(length, seed, RECIPES[name].vocab_size) for seed, length in enumerate(LENGTHS)]
    got = in_chunks(backbone, prompts, ADAPTERS)
    for adapter, parts in drawn.items():
        merged = {
            key: value + (parts[path].b.double() @ parts[path].a.double()).float()
            if (path := key.removesuffix(".weight")) in parts
            else value
            for key, value in tensors.items()
        }
        expected = in_chunks(backbones(RECIPES[name], merged)[0], prompts, [0] * len(prompts))
        for place in range(len(prompts)):
            if ADAPTERS[place] == adapter:
                assert relative(got[place], expected[place]) < 2e-5


def test_threads_and_the_rows_wanted_change_no_bit() -> None:
    recipe = RECIPES["everything"]
    backbone, stepwise = backbones(recipe, draw_tensors(recipe, torch.bfloat16, biases=True))
    drawn = draw_low_ranks(backbone, torch.bfloat16)
    for each in (backbone, stepwise):
        put(each, drawn)
    prompts = [tokens(length, seed, recipe.vocab_size) for seed, length in enumerate(LENGTHS)]
    expected = in_chunks(stepwise, prompts, ADAPTERS)
    num_threads = torch.get_num_threads()
    try:
        for threads in (2, 3, 7):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, in_chunks(backbone, prompts, ADAPTERS), expected))
    finally:
        torch.set_num_threads(num_threads)
    run = AdaptedRun(backbone, {0: 0})
    ids, spans = torch.tensor(prompts[3]), (AdapterSpan(2, 3, 10), AdapterSpan(1, 10, 11), AdapterSpan(2, 15, 30))
    metadata, positions = run.metadata_for([(0, prompts[3])]), torch.arange(len(prompts[3]))
    every = backbone.forward(ids, positions, metadata, torch.arange(len(ids)), spans)
    for wanted in ([29], [0], [4, 12, 3, 3, 29, 10, 0], [*range(30), 5], []):
        got = backbone.forward(ids, positions, metadata, torch.tensor(wanted, dtype=torch.int64), spans)
        assert torch.equal(got, every[wanted])
    hidden = backbone.hidden_states(ids, positions, metadata, spans)
    assert torch.equal(backbone.logits(hidden), every)
    run.close()


def test_bad_adapters_and_spans_are_refused_in_words() -> None:
    backbone, _ = backbones(RECIPES["plain"], draw_tensors(RECIPES["plain"], torch.float32))
    model = backbone.model
    assert isinstance(model, FusedModel)
    assert model.decoder is not None
    handle, none = model.decoder.handle, torch.empty(0)
    a, b = ops.pack_linear(torch.randn(4, 60)), ops.pack_linear(torch.randn(640, 4))
    for low_ranks, ranks, message in (
        ([none] * 24, [0] * 11, "ranks: wanted 12 entries, got 11"),
        ([none] * 22, [0] * 12, "low_ranks: wanted 24 entries, got 22"),
        ([none] * 24, [-1] + [0] * 11, "ranks: wanted positive"),
        ([a, b[:-1]] + [none] * 22, [4] + [0] * 11, "low_ranks: wanted"),
        ([a, b] + [none] * 22, [5] + [0] * 11, "low_ranks: wanted"),
        ([a.bfloat16(), b] + [none] * 22, [4] + [0] * 11, "low_ranks: wanted"),
        ([none, none, a, b] + [none] * 20, [0, 4] + [0] * 10, "low_ranks: wanted"),
    ):
        with pytest.raises(RuntimeError, match=message):
            decoder_ops.adapt(handle, low_ranks, ranks)
    decoder_ops.adapt(handle, [a, b] + [none] * 22, [4] + [0] * 11)
    run = AdaptedRun(backbone, {0: 0})
    inputs = torch.arange(4), torch.arange(4), run.metadata_for([(0, [0, 1, 2, 3])]), torch.arange(4)
    for spans in (((2, 0, 1),), ((0, 0, 1),), ((1, 0, 5),), ((1, 2, 2),), ((1, -1, 2),), ((1, 2, 4), (1, 0, 1))):
        with pytest.raises(RuntimeError, match="spans: wanted"):
            backbone.forward(*inputs, tuple(AdapterSpan(*span) for span in spans))
    backbone.forward(*inputs, (AdapterSpan(1, 0, 1), AdapterSpan(1, 2, 4)))
    run.close()


class HalfSeen(nn.Module):
    """A module that sees every other token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[:, ::2] = self.inner(x[:, ::2])
        return y


def test_a_layer_that_does_not_see_all_tokens_takes_no_adapter(tmp_path: Path) -> None:
    backbone = paged_backbone("gpt2", NativeAttention(), "swapped", join=False)
    model = backbone.model
    assert isinstance(model, TreeModel)
    model.tree.transformer.h[1].mlp = HalfSeen(model.tree.transformer.h[1].mlp)
    shapes = shapes_of(backbone)
    seen = {path: shape for path, shape in shapes.items() if ".inner." not in path}
    assert len(seen) < len(shapes)
    add_adapters(backbone, [write_adapter(tmp_path / "seen", seen, exclude_modules="inner")])
    assert shapes_of(backbone) == shapes
    in_chunks(backbone, [tokens(20)], [1])
    with pytest.raises(StartError, match=r"transformer\.h\.1\.mlp\.inner\.c_"):
        add_adapters(backbone, [write_adapter(tmp_path / "all", shapes)])
