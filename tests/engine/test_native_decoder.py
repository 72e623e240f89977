"""The decoder in one native call gives the bits of the same decoder op by op, and fails in words."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import decoder_ops, ops
from engine.config import Quantization
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.self_check import PagedRun
from tests.engine.recipes import RECIPES, VOCAB_SIZE, WIDE_NORMS, backbones, draw_tensors
from tests.engine.tiny_configs import tokens

DTYPES = [torch.float32, torch.bfloat16]
# prompts, then prompts beside decodes, a long sequence alone, decodes together
STEPS = [
    [(0, 37), (1, 5)],
    [(0, 1), (2, 290), (1, 1)],
    [(2, 1)],
    [(1, 1), (2, 1), (0, 1)],
    [(2, 20), (0, 1)],
]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    ops.set_isa("auto")


def pieces(step: list[tuple[int, int]], seed: int) -> list[tuple[int, list[int]]]:
    return [(sequence, tokens(count, seed + sequence, VOCAB_SIZE)) for sequence, count in step]


def bits(tensor: Tensor) -> Tensor:
    """NaN equals NaN: slots that were never written must stay so."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


def assert_same_caches(one: Backbone, other: Backbone) -> None:
    for mine, theirs in zip(one.layers, other.layers, strict=True):
        for cache, other_cache in ((mine.key_cache, theirs.key_cache), (mine.value_cache, theirs.value_cache)):
            assert cache is not None
            assert other_cache is not None
            assert torch.equal(bits(cache), bits(other_cache))


def assert_same_run(name: str, tensors: dict[str, Tensor], quantization: Quantization = "none") -> None:
    native, stepwise = backbones(RECIPES[name], tensors, quantization)
    runs = [PagedRun(backbone, num_blocks=40) for backbone in (native, stepwise)]
    for seed, step in enumerate(STEPS):
        got, wanted = (torch.cat(run.step(pieces(step, 10 * seed))) for run in runs)
        assert bool(wanted.isfinite().all())
        assert float(wanted.std()) > 0.1
        assert torch.equal(got, wanted)
    assert_same_caches(native, stepwise)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_single_ops(name: str, dtype: torch.dtype, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    assert_same_run(name, draw_tensors(RECIPES[name], dtype, wide_norms=name in WIDE_NORMS))


@pytest.mark.parametrize("level", ops.isa_levels())
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_every_instruction_set_level(level: str, dtype: torch.dtype) -> None:
    ops.set_isa(level)
    torch.set_num_threads(2)
    assert_same_run("everything", draw_tensors(RECIPES["everything"], dtype, biases=True))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "intermediate"), [("everything", 96), ("plain", 70)])
def test_quantised(name: str, intermediate: int, dtype: torch.dtype, quantization: Quantization) -> None:
    torch.set_num_threads(2)
    tensors = draw_tensors(RECIPES[name], dtype, hidden=128, intermediate=intermediate, biases=True)
    assert_same_run(name, tensors, quantization)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "intermediate"), [(1000, 60), (60, 1000), (33, 7)])
def test_odd_widths_and_biases(hidden: int, intermediate: int, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    tensors = draw_tensors(RECIPES["qk_norms"], dtype, hidden=hidden, intermediate=intermediate, biases=True)
    assert_same_run("qk_norms", tensors)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_only_the_wanted_rows_pass_the_head(name: str, dtype: torch.dtype) -> None:
    torch.set_num_threads(2)
    native, stepwise = backbones(RECIPES[name], draw_tensors(RECIPES[name], dtype))
    for wanted in ([36, 41], [], [5, 5, 0], list(range(42)), list(range(42))[::-1], [7] * 60):
        indices = torch.tensor(wanted, dtype=torch.int64)
        logits = []
        for backbone in (native, stepwise):
            run = PagedRun(backbone, num_blocks=40)
            parts = pieces(STEPS[0], 3)
            metadata = run.metadata_for(parts)
            ids = torch.tensor([token for _, part in parts for token in part])
            positions = torch.cat([torch.arange(len(part)) for _, part in parts])
            logits.append(backbone.forward(ids, positions, metadata, indices))
        assert logits[0].shape == (len(wanted), VOCAB_SIZE)
        assert torch.equal(*logits)
        assert_same_caches(native, stepwise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_and_the_head_alone(dtype: torch.dtype) -> None:
    told = []
    for backbone in backbones(RECIPES["everything"], draw_tensors(RECIPES["everything"], dtype)):
        run = PagedRun(backbone, num_blocks=40)
        parts = pieces(STEPS[0], 3)
        metadata = run.metadata_for(parts)
        ids = torch.tensor([token for _, part in parts for token in part])
        positions = torch.cat([torch.arange(len(part)) for _, part in parts])
        hidden = backbone.hidden_states(ids, positions, metadata)
        assert torch.equal(
            backbone.logits(hidden[3:5]), backbone.forward(ids, positions, metadata, torch.tensor([3, 4]))
        )
        told.append(hidden)
    assert told[0].dtype == dtype
    assert torch.equal(*told)


def test_tokens_without_a_sequence_are_left_alone() -> None:
    """Padding behind the last sequence: no cache is written, and the rows before it keep their bits."""
    native, _ = backbones(RECIPES["plain"], draw_tensors(RECIPES["plain"], torch.float32))
    run = PagedRun(native, num_blocks=8)
    metadata = run.metadata_for([(0, [1, 2, 3])])
    ids, positions = torch.tensor([1, 2, 3]), torch.arange(3)
    alone = native.forward(ids, positions, metadata, torch.arange(3))
    padded = type(metadata)(
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        torch.cat([metadata.slot_mapping, torch.tensor([-1, -1])]),
        3,
        3,
    )
    longer = torch.cat([ids, torch.tensor([4, 5])])
    got = native.forward(longer, torch.cat([positions, torch.zeros(2, dtype=torch.int64)]), padded, torch.arange(5))
    assert torch.equal(got[:3], alone)
    assert bool(got.isfinite().all())


def test_tables_and_caches_may_move() -> None:
    """A longer rotary table or another cache is found out before the next forward."""
    recipe, tensors = RECIPES["plain"], draw_tensors(RECIPES["plain"], torch.float32)
    native, stepwise = backbones(recipe, tensors)
    for first_position in (0, 3000):
        runs = [PagedRun(backbone, 40, first_position) for backbone in (native, stepwise)]
        assert torch.equal(*(torch.cat(run.step(pieces(STEPS[0], 3))) for run in runs))


# ---- refusals -------------------------------------------------------------------------------------------------


def arguments(**changed: Any) -> tuple[FusedModel, dict[str, Any]]:
    native, _ = backbones(RECIPES["plain"], draw_tensors(RECIPES["plain"], torch.float32))
    run = PagedRun(native, num_blocks=8)
    metadata = run.metadata_for([(0, [1, 2, 3]), (1, [4])])
    native.forward(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 1, 2, 0]), metadata, torch.tensor([2]))
    values = {
        "input_ids": torch.tensor([1, 2, 3, 4]),
        "positions": torch.tensor([0, 1, 2, 0]),
        "block_tables": metadata.block_tables,
        "query_start_loc": metadata.query_start_loc,
        "seq_lens": metadata.seq_lens,
        "slot_mapping": metadata.slot_mapping,
        "logits_indices": torch.tensor([3]),
    }
    assert isinstance(native.model, FusedModel)
    return native.model, values | changed


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"input_ids": torch.tensor([1, 2, 3, VOCAB_SIZE])}, "input_ids: wanted numbers below 97, got 97"),
        ({"input_ids": torch.tensor([1, -1, 3, 4])}, "input_ids: wanted numbers below 97, got -1"),
        ({"input_ids": torch.tensor([1, 2, 3, 4], dtype=torch.int32)}, "input_ids: wanted int64"),
        ({"input_ids": torch.arange(8)[::2]}, "input_ids: wanted a contiguous"),
        ({"positions": torch.tensor([0, 1, 2])}, "positions: wanted"),
        ({"positions": torch.tensor([0, 1, 2, 1 << 20])}, "positions: wanted numbers below"),
        ({"slot_mapping": torch.tensor([0, 1, 2, 128])}, "slot_mapping: wanted numbers below 128, got 128"),
        ({"logits_indices": torch.tensor([4])}, "logits_indices: wanted numbers below 4"),
        ({"query_start_loc": torch.tensor([0, 3, 5], dtype=torch.int32)}, "query_start_loc: wanted ascending"),
        ({"query_start_loc": torch.tensor([0, 4], dtype=torch.int32)}, "query_start_loc: wanted"),
        ({"seq_lens": torch.tensor([3, 17], dtype=torch.int32)}, "seq_lens: wanted lengths"),
        ({"block_tables": torch.tensor([[0], [8]], dtype=torch.int32)}, "block_tables: wanted block ids below 8"),
        ({"spans": [1, 0, 4]}, "spans: wanted adapters from 1 to 0, got 1"),
        ({"spans": [1, 0]}, "spans: wanted three numbers for each"),
    ],
)
def test_a_bad_step_is_refused_in_words(changed: dict[str, Tensor], message: str) -> None:
    model, values = arguments(**changed)
    assert model.decoder is not None
    with pytest.raises(RuntimeError, match=message):
        decoder_ops.forward(model.decoder.handle, **values)


def test_a_handle_ends_with_its_model() -> None:
    model, values = arguments()
    assert model.decoder is not None
    handle = model.decoder.handle
    decoder_ops.forward(handle, **values)
    del model
    with pytest.raises(RuntimeError, match="decoder_forward: handle: wanted one from decoder_create"):
        decoder_ops.forward(handle, **values)


def test_without_caches_there_is_no_step() -> None:
    model, values = arguments()
    assert model.decoder is not None
    caches = [torch.zeros(8, 2, 16, 64) for _ in RECIPES["plain"].layers]
    with pytest.raises(RuntimeError, match="key_caches: wanted 3 entries, got 2"):
        decoder_ops.attach(model.decoder.handle, [], caches[:2], caches)
    with pytest.raises(RuntimeError, match="call decoder_attach first"):
        decoder_ops.forward(model.decoder.handle, **values)


def test_a_refused_attachment_leaves_nothing_behind() -> None:
    native, _ = backbones(RECIPES["plain"], draw_tensors(RECIPES["plain"], torch.float32))
    first = PagedRun(native, num_blocks=8).step([(0, [1, 2, 3])])[0]
    run, layer = PagedRun(native, num_blocks=8), native.layers[1]
    whole = layer.key_cache
    assert whole is not None
    layer.key_cache = whole[:4]
    with pytest.raises(RuntimeError, match="key_caches: wanted"):
        run.step([(1, [1, 2, 3])])
    layer.key_cache = whole
    assert torch.equal(run.step([(0, [1, 2, 3])])[0], first)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model.layers.1.mlp.down_proj.weight", "down: wanted"),
        ("model.layers.2.input_layernorm.weight", "input norm: wanted"),
        ("model.layers.0.self_attn.o_proj.weight", "output: wanted"),
        ("lm_head.weight", "head: wanted"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(name: str, message: str) -> None:
    tensors = draw_tensors(RECIPES["plain"], torch.float32)
    tensors[name] = tensors[name][..., :-1].contiguous()
    with pytest.raises(RuntimeError, match=message):
        backbones(RECIPES["plain"], tensors)


# ---- threads --------------------------------------------------------------------------------------------------


def test_python_runs_while_it_computes() -> None:
    """With so long a switch interval another thread runs only if the call itself lets go of the lock."""
    model, values = arguments()
    assert model.decoder is not None
    handle, turns, is_over = model.decoder.handle, [0], threading.Event()

    def count() -> None:
        while not is_over.is_set():
            turns[0] += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    counting = threading.Thread(target=count)
    counting.start()
    try:
        sys.setswitchinterval(1000.0)
        for _ in range(10000):
            before = turns[0]
            decoder_ops.forward(handle, **values)
            if turns[0] > before:
                break
        else:
            pytest.fail("no other thread had a turn")
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        counting.join()


def test_two_models_at_once() -> None:
    """The second finds the team at work and goes alone; neither notices."""
    torch.set_num_threads(2)
    tensors = draw_tensors(RECIPES["plain"], torch.bfloat16)
    expected = PagedRun(backbones(RECIPES["plain"], tensors)[1], num_blocks=40).step(pieces(STEPS[0], 3))
    wrong: list[int] = []

    def compute() -> None:
        torch.set_num_threads(2)
        native, _ = backbones(RECIPES["plain"], tensors)
        for _ in range(20):
            got = PagedRun(native, num_blocks=40).step(pieces(STEPS[0], 3))
            if not all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)):
                wrong.append(1)

    both = [threading.Thread(target=compute) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert not wrong


PROCESS = """
import os, sys, weakref
import torch
from engine import decoder_ops
from tests.engine.test_native_decoder import arguments
model, values = arguments()
torch.set_num_threads(4)
compute = lambda: decoder_ops.forward(model.decoder.handle, **values)
first = compute()
if sys.argv[1] == "fork":
    child = os.fork()
    same = all(torch.equal(compute(), first) for _ in range(20))
    if child == 0:
        os._exit(0 if same else 3)
    sys.exit(0 if same and os.waitpid(child, 0)[1] == 0 else 4)
if sys.argv[1] == "nested":  # the end of a decoder's last tensor ends another decoder
    other, _ = arguments()
    kept, embedding = model.decoder, model._embedding
    weakref.finalize(embedding, decoder_ops.destroy, other.decoder.handle)
    del model, embedding
    decoder_ops.destroy(kept.handle)
    try:
        decoder_ops.forward(other.decoder.handle, **values)
    except RuntimeError as error:
        sys.exit(0 if "wanted one from decoder_create" in str(error) else 5)
    sys.exit(6)
"""


@pytest.mark.parametrize("kind", ["plain", "fork", "nested"])
def test_processes_fork_and_end(kind: str) -> None:
    """With more threads than cores; a child starts its own."""
    subprocess.run([sys.executable, "-c", PROCESS, kind], check=True, timeout=120)
