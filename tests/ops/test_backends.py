"""The two attention backends behind one interface: a prompt in chunks, then decodes, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionMetadata, LayerSpec, PagedLayer
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention
from tests.ops.paged import Shape, empty_caches

SHAPE = Shape()
STEPS = ([16, 3], [24, 1], [1, 1], [1, 1])  # tokens of each sequence per step


def steps() -> Iterator[AttentionMetadata]:
    tables = torch.tensor([[3, 0, 5, -1], [2, -1, -1, -1]], dtype=torch.int32)
    computed = [0, 0]
    for counts in STEPS:
        slots = []
        for s, count in enumerate(counts):
            positions = range(computed[s], computed[s] + count)
            slots += [int(tables[s, p // 16]) * 16 + p % 16 for p in positions]
            computed[s] += count
        yield AttentionMetadata(
            block_tables=tables,
            query_start_loc=torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32),
            seq_lens=torch.tensor(computed, dtype=torch.int32),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            max_query_len=max(counts),
            max_seq_len=max(computed),
        )


def run(backend: AttentionBackend, dtype: torch.dtype, **options: object) -> list[Tensor]:
    """Outputs of every step; the inputs are the same for every backend."""
    generator = torch.Generator().manual_seed(0)
    spec = LayerSpec(num_query_heads=6, num_kv_heads=2, key_dim=64, value_dim=64)
    layer = PagedLayer(0, spec, *empty_caches(6, SHAPE, dtype))
    outputs = []
    for metadata in steps():
        layer.metadata = metadata
        tokens = len(metadata.slot_mapping)
        qkv = torch.randn(tokens, 10, 64, generator=generator).to(dtype)
        outputs.append(backend.forward(qkv[:, :6], qkv[:, 6:8], qkv[:, 8:], layer, scale=0.125, **options))
    return outputs


@pytest.mark.parametrize(
    "options",
    [{}, {"window": 20}, {"chunk": 16}, {"softcap": 5.0}, {"sinks": torch.linspace(-1, 1, 6)}],
    ids=["plain", "window", "chunk", "softcap", "sinks"],
)
def test_native_equals_reference(level: str, dtype: torch.dtype, options: dict[str, object]) -> None:
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    native, reference = run(NativeAttention(), dtype, **options), run(ReferenceAttention(), dtype, **options)
    for ours, oracle in zip(native, reference, strict=True):
        assert ours.dtype == oracle.dtype == dtype
        torch.testing.assert_close(ours, oracle, rtol=tolerance, atol=tolerance)


def test_reference_equals_torch() -> None:
    """The oracle itself, against torch's own attention over the sequence's keys in order."""
    generator = torch.Generator().manual_seed(0)
    keys, values, last = [], [], torch.empty(0)
    for counts in STEPS:
        qkv = torch.randn(sum(counts), 10, 64, generator=generator)
        keys.append(qkv[: counts[0], 6:8])
        values.append(qkv[: counts[0], 8:])
        last = qkv[counts[0] - 1, :6]
    dense = torch.nn.functional.scaled_dot_product_attention(
        last[None, :, None],
        torch.cat(keys).transpose(0, 1)[None],
        torch.cat(values).transpose(0, 1)[None],
        scale=0.125,
        enable_gqa=True,
    )
    torch.testing.assert_close(run(ReferenceAttention(), torch.float32)[-1][0], dense[0, :, 0], rtol=1e-5, atol=1e-5)


def test_a_layer_outside_a_step_says_so() -> None:
    layer = PagedLayer(7, LayerSpec(num_query_heads=6, num_kv_heads=2, key_dim=64, value_dim=64))
    rows = torch.zeros(1, 6, 64)
    for backend in (NativeAttention(), ReferenceAttention()):
        with pytest.raises(RuntimeError, match="layer 7 ran outside a step"):
            backend.forward(rows, rows[:, :2], rows[:, :2], layer, scale=1.0)
