"""The ops that only a device's path uses: emulated (or on a GPU) and in plain torch, the same bits, padding too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine import device_ops
from engine.cuda_graph import padding
from engine.device_ops import BatchBuffers, HeadNorms, RotaryTables
from tests.ops import device_reference
from tests.ops.device_kernels import LaunchedDeviceOps
from tests.ops.device_reference import device_ops_on_cpu  # noqa: F401
from tests.ops.kernels import LaunchedOps
from tests.ops.paged import Shape, empty_caches
from tests.ops.test_cuda_batch import BLOCK, ROWS, state
from tests.ops.test_cuda_heads import Heads
from tests.ops.test_norm import close
from tests.ops.test_sampler import random_logits

pytestmark = pytest.mark.usefixtures("device_ops_on_cpu")

VOCAB = 1003


def both(launched: LaunchedOps, name: str, *arguments: object) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors among the arguments after the kernel, and after the plain torch behind engine.device_ops."""
    found = []
    for place in (LaunchedDeviceOps(launched), device_ops):
        copies = [_copy(argument) for argument in arguments]
        getattr(place, name)(*copies)
        flat = [x for c in copies for x in (c if isinstance(c, tuple) else (c,)) if isinstance(x, Tensor)]
        found.append(flat)
    return found[0], found[1]


def _copy(argument: object) -> object:
    if isinstance(argument, BatchBuffers):
        return BatchBuffers(*(tensor.clone() for tensor in argument))
    return argument.clone() if isinstance(argument, Tensor) else argument


def same(launched: LaunchedOps, name: str, *arguments: object) -> None:
    kernel, plain = both(launched, name, *arguments)
    for got, want in zip(kernel, plain, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def buffers(num_tokens: int, num_seqs: int, width: int) -> BatchBuffers:
    """Full of what nobody wrote."""
    long = [torch.full((num_tokens,), -7) for _ in range(3)]
    tables = torch.full((num_seqs, width), -7, dtype=torch.int32)
    counts = [torch.full((n,), -7, dtype=torch.int32) for n in (num_seqs + 1, num_seqs)]
    return BatchBuffers(*long, *counts, tables, torch.full((num_seqs,), -7))


@pytest.mark.parametrize("width", [4, 19])
def test_batches_with_padding(launched: LaunchedOps, width: int) -> None:
    ids, tables = state()
    rows, computed, counts = torch.tensor([7, -1, 3, 8, -1, -1]), int32(0, 0, 16, 40, 9, 0), int32(40, 1, 2, 15, 3, 1)
    same(launched, "prepare_batch", ids, tables, BLOCK, rows, computed, counts, buffers(70, 6, width))


def test_a_batch_of_padding_alone(launched: LaunchedOps) -> None:
    ids, tables = state()
    rows, none, ones = torch.full((5,), -1), torch.zeros(5, dtype=torch.int32), torch.ones(5, dtype=torch.int32)
    made = buffers(5, 5, 3)
    LaunchedDeviceOps(launched).prepare_batch(ids, tables, BLOCK, rows, none, ones, made)
    for got, want in zip(made, padding(5, 3, torch.device("cpu")), strict=True):
        assert torch.equal(got, want)


def test_decode_steps(launched: LaunchedOps) -> None:
    ids, tables = state(2)
    rows, drawn = torch.tensor([6, -1, 2, 8, 1, 1]), torch.tensor([11, 12, -1, 14, 15, 16])
    made = buffers(6, 6, 3)._replace(seq_lens=int32(15, 4, 16, 300, 3, 3))
    same(launched, "advance_batch", ids, tables, BLOCK, rows, drawn, int32(4), made)


def test_stored_tokens(launched: LaunchedOps) -> None:
    ids, _ = state(3)
    rows, positions = torch.tensor([8, -1, 0, 3]), torch.tensor([0, 5, 319, 17])
    same(launched, "store_tokens", ids, rows, positions, torch.tensor([70_000, 1, -2, 5]))


# ---- edits of logits ------------------------------------------------------------------------------------------


def counted(rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """counts, prompt_bits, num_prompt and num_tokens for load_counts."""
    counts = torch.full((ROWS, VOCAB), 9, dtype=torch.int32)
    bits = torch.full((ROWS, -(-VOCAB // 32)), -1, dtype=torch.int32)
    num_tokens = (40 * rows.clamp(min=0)).int()
    return counts, bits, num_tokens // 3, num_tokens


def test_counts(launched: LaunchedOps) -> None:
    ids = state(4)[0] % VOCAB
    rows = torch.tensor([6, -1, 0, 3, 8])
    counts, bits, num_prompt, num_tokens = counted(rows)
    same(launched, "load_counts", counts, bits, rows, ids, num_prompt, num_tokens)
    drawn = torch.tensor([3, 4, -1, VOCAB - 1, 3])
    same(launched, "count_tokens", counts, torch.tensor([3, -1, 0, 3, 3]), drawn)


def test_penalties(launched: LaunchedOps) -> None:
    ids = state(5)[0] % VOCAB
    rows = torch.arange(ROWS)
    counts, bits, num_prompt, num_tokens = counted(rows)
    device_reference.load_counts(counts, bits, rows, ids, num_prompt, num_tokens)
    logits = random_logits(5, VOCAB, seed=3)
    logits[:, 5:20] = -torch.inf
    values = torch.tensor([[0.5, 0.25, 1.3], [0.0, 0.0, 1.0], [0.0, -1.5, 1.0], [2.0, 0.0, 0.7], [0.0, 0.1, 2.0]])
    presence, frequency, repetition = (column.contiguous() for column in values.T)
    where = torch.tensor([6, 8, 4, -1, 5])
    same(launched, "apply_penalties", logits, where, counts, bits, presence, frequency, repetition)


def test_biases_and_masks(launched: LaunchedOps) -> None:
    logits = random_logits(4, VOCAB, seed=6)
    rows, ids = torch.tensor([0, 2, -1, 1]), torch.tensor([5, VOCAB - 1, 7, 0])
    same(launched, "add_bias", logits, rows, ids, torch.tensor([1.5, -torch.inf, 3.0, 0.25]))
    masks = torch.randint(-(2**31), 2**31, (4, 30), generator=torch.Generator().manual_seed(5)).int()
    same(launched, "apply_token_bitmask", logits, masks[:2].clone(), torch.tensor([1, -1, 0, 1]))
    same(launched, "apply_token_bitmask", logits, masks, None)


# ---- queries, keys and the cache ------------------------------------------------------------------------------


@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_rotations(launched: LaunchedOps, dtype: torch.dtype, rotary_dim: int) -> None:
    heads = Heads(dtype, rotary_dim=rotary_dim)
    query, key, _ = heads.parts(heads.fused)
    same(launched, "rotary", query.contiguous(), key.contiguous(), RotaryTables(*heads.tables), heads.positions)


@pytest.mark.parametrize("variant", ["llama", "gemma", "f32"])
def test_head_norms(launched: LaunchedOps, dtype: torch.dtype, variant: str) -> None:
    heads = Heads(dtype)
    query, key, _ = heads.parts(heads.fused)
    norms = HeadNorms(*heads.weights, 1e-5, variant)  # type: ignore[arg-type]
    kernel, plain = both(launched, "qk_norm", query.contiguous(), key.contiguous(), norms, None, heads.positions)
    for got, want in zip(kernel[:2], plain[:2], strict=True):
        close(got, want, roundings=2)


def test_rotation_and_cache(launched: LaunchedOps) -> None:
    """bfloat16, in which the CPU's cache may order a row's elements otherwise: read back through attention."""
    heads = Heads(torch.bfloat16)
    shape = Shape(kv_heads=2)
    outputs = []
    for place in (LaunchedDeviceOps(launched), device_ops):
        query, key, value = (part.contiguous() for part in heads.parts(heads.fused.clone()))
        caches = empty_caches(3, shape, torch.bfloat16)
        slots = torch.arange(16, 16 + heads.tokens)
        slots[4] = -1
        place.rope_and_cache(  # type: ignore[attr-defined]
            query, key, value, *caches, slots, heads.positions, tables=RotaryTables(*heads.tables)
        )
        out = torch.full_like(query[:3], torch.nan)
        workspace = torch.zeros(place.paged_attention_workspace(3, 1, 48, 6, 2, 64), dtype=torch.uint8)  # type: ignore[attr-defined]
        place.paged_attention_into(  # type: ignore[attr-defined]
            out, query[:3], *caches, torch.tensor([[1, 2], [0, 0], [1, 0]], dtype=torch.int32), int32(0, 1, 2, 3),
            int32(21, 0, 4), workspace, scale=0.125, max_query_len=1, max_seq_len=48,
        )  # fmt: skip
        outputs.append((query, key, out))
    (query, key, out), (plain_query, plain_key, plain_out) = outputs
    assert torch.equal(query, plain_query)
    assert torch.equal(key, plain_key)
    assert not out[1].any(), "padding sees no key"
    assert out[2].isfinite().all()
    torch.testing.assert_close(out[2:], plain_out[2:], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("multiprocessors", [1, 40])
def test_bounds_cannot_be_seen_in_attention(launched: LaunchedOps, multiprocessors: int) -> None:
    """What a recorded step passes, the longest there may ever be, gives the bits of the batch's own lengths; sequences
    of several splits, of one, and padding."""
    shape = Shape(kv_heads=2, group=2)
    lengths = [2100, 1, 0, 300, 0, 1030]
    generator = torch.Generator().manual_seed(9)
    width = 160
    num_blocks = sum(-(-length // BLOCK) for length in lengths)
    caches = empty_caches(num_blocks, shape, torch.bfloat16)
    order = torch.randperm(num_blocks, generator=generator).int().tolist()
    tables = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, length in enumerate(lengths):
        for place in range(0, length, BLOCK):
            tables[row, place // BLOCK] = block = order.pop()
            for cache in caches:
                held = min(BLOCK, length - place)
                cache[block, :, :held] = torch.randn(2, held, 64, generator=generator).bfloat16()
    query = torch.randn(len(lengths), 4, 64, generator=generator).bfloat16()
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    found = []
    for longest in (max(lengths), width * BLOCK):
        found.append(
            launched.paged_attention(
                query, *caches, tables, starts, int32(*lengths), scale=0.125, max_query_len=1, max_seq_len=longest,
                multiprocessors=multiprocessors,
            )
        )  # fmt: skip
    assert torch.equal(*found)
    assert found[0].isfinite().all()
    assert not found[0][[2, 4]].any()
    alone = launched.paged_attention(
        query[:1], *caches, tables[:1], starts[:2], int32(lengths[0]), scale=0.125, max_query_len=1
    )
    assert torch.equal(alone, found[0][:1])
