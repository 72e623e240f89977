"""In its last layer the decoder asks queries of those tokens only that lead to a wanted row: with every mix of rows it
gives the bits, and leaves the caches, of the same decoder op by op over all tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.config import Quantization
from engine.models.backbone import Backbone
from engine.models.deltas import AdapterSpan
from engine.models.self_check import PagedRun
from tests.engine.recipes import RECIPES, VOCAB_SIZE, WIDE_NORMS, backbones, draw_tensors
from tests.engine.test_lora_models import draw_low_ranks, put
from tests.engine.test_native_decoder import DTYPES, assert_same_caches
from tests.engine.tiny_configs import tokens

# (sequence, how many of its tokens), then the wanted rows of each step
STEPS: list[tuple[list[tuple[int, int]], list[int]]] = [
    ([(0, 40), (1, 23)], []),  # chunks that end before their prompts do
    ([(0, 30), (1, 1), (2, 9)], [30, 39]),  # a chunk that does not end, a decode, a whole prompt
    ([(0, 270), (2, 1), (1, 1)], [269, 270, 271]),  # a last chunk beside decodes
    ([(3, 25), (0, 20)], [44, 24]),  # in another order
    ([(1, 40), (0, 1)], [37, 38, 39, 40]),  # several at an end
    ([(2, 30), (3, 30)], [25, 58, 25]),  # before an end, twice
    ([(2, 30), (3, 30)], [3, 59]),  # more queries than would be worth a plan of their own
    ([(0, 1), (1, 1), (2, 1)], [0, 1, 2]),
    ([(0, 1), (1, 1), (2, 1)], [2]),
]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    ops.set_isa("auto")


class Feeder(PagedRun):
    """Runs steps of which only some rows are wanted."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__(backbone, num_blocks=60)
        self._done: dict[int, int] = {}

    def feed(
        self, step: list[tuple[int, int]], wanted: list[int], seed: int, spans: tuple[AdapterSpan, ...] = ()
    ) -> Tensor:
        parts = [(sequence, tokens(count, seed + sequence, VOCAB_SIZE)) for sequence, count in step]
        starts = [self._done.get(sequence, 0) for sequence, _ in step]
        self._done |= {sequence: start + count for start, (sequence, count) in zip(starts, step, strict=True)}
        positions = [torch.arange(start, start + count) for start, (_, count) in zip(starts, step, strict=True)]
        ids = torch.tensor([token for _, part in parts for token in part])
        indices = torch.tensor(wanted, dtype=torch.int64)
        return self._backbone.forward(ids, torch.cat(positions), self.metadata_for(parts), indices, spans)


def assert_same_rows(name: str, tensors: dict[str, Tensor], quantization: Quantization = "none") -> None:
    native, stepwise = backbones(RECIPES[name], tensors, quantization)
    runs = [Feeder(backbone) for backbone in (native, stepwise)]
    for seed, (step, wanted) in enumerate(STEPS):
        got, expected = (run.feed(step, wanted, 10 * seed) for run in runs)
        assert got.shape == (len(wanted), VOCAB_SIZE)
        assert bool(expected.isfinite().all())
        assert torch.equal(got, expected)
        assert_same_caches(native, stepwise)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_all_rows(name: str, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    assert_same_rows(name, draw_tensors(RECIPES[name], dtype, wide_norms=name in WIDE_NORMS))


@pytest.mark.parametrize("level", ops.isa_levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_every_instruction_set_level(level: str, dtype: torch.dtype) -> None:
    ops.set_isa(level)
    torch.set_num_threads(2)
    assert_same_rows("everything", draw_tensors(RECIPES["everything"], dtype, biases=True))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["everything", "parallel"])
def test_quantised(name: str, dtype: torch.dtype, quantization: Quantization) -> None:
    torch.set_num_threads(2)
    assert_same_rows(name, draw_tensors(RECIPES[name], dtype, hidden=128, intermediate=96, biases=True), quantization)


@pytest.mark.parametrize("hidden", [1000, 33])
def test_odd_widths(hidden: int) -> None:
    torch.set_num_threads(2)
    tensors = draw_tensors(RECIPES["parallel"], torch.bfloat16, hidden=hidden, intermediate=7, biases=True)
    assert_same_rows("parallel", tensors)


@pytest.mark.parametrize("without_queries", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_adapters(dtype: torch.dtype, without_queries: bool) -> None:
    """without_queries: they add to all products but that of q, k and v."""
    torch.set_num_threads(2)
    pair = backbones(RECIPES["everything"], draw_tensors(RECIPES["everything"], dtype, biases=True))
    drawn = draw_low_ranks(pair[0], dtype)
    if without_queries:
        drawn = {
            adapter: {path: low for path, low in parts.items() if path.rpartition(".")[2][0] not in "qkv"}
            for adapter, parts in drawn.items()
        }
    for backbone in pair:
        put(backbone, drawn)
    for adapter_of_first in (0, 2):
        runs = [Feeder(backbone) for backbone in pair]
        for seed, (step, wanted) in enumerate(STEPS):
            first, total = step[0][1], sum(count for _, count in step)
            spans = [AdapterSpan(1, first, total)]
            if adapter_of_first:
                spans.insert(0, AdapterSpan(adapter_of_first, 0, first))
            got, expected = (run.feed(step, wanted, 10 * seed, tuple(spans)) for run in runs)
            assert torch.equal(got, expected)
            assert_same_caches(*pair)


def test_rows_of_padding() -> None:
    """Behind the last sequence: wanted with others or alone they get the logits of a token that attends to nothing."""
    native, _ = backbones(RECIPES["plain"], draw_tensors(RECIPES["plain"], torch.float32))
    run = PagedRun(native, num_blocks=8)
    count, padding = 20, 3
    metadata = run.metadata_for([(0, tokens(count, 1, VOCAB_SIZE))])
    slots = torch.cat([metadata.slot_mapping, torch.full((padding,), -1)])
    ids = torch.tensor(tokens(count + padding, 1, VOCAB_SIZE))
    positions = torch.cat([torch.arange(count), torch.zeros(padding, dtype=torch.int64)])
    inputs = ids, positions, replace(metadata, slot_mapping=slots)
    every = native.forward(*inputs, torch.arange(count + padding))
    for wanted in ([22, 21], [19, 20], [20, 18, 22], [0, 21]):
        assert torch.equal(native.forward(*inputs, torch.tensor(wanted)), every[wanted])
