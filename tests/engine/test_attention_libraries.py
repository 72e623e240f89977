"""Attention by a library: which way every prompt goes, what the library is handed, the words when there is none."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.attention.base import AttentionMetadata, HostLengths, LayerSpec, PagedLayer
from engine.attention.flash import LibraryAttention
from engine.attention.libraries import FlashAttention, Lengths, TorchVarlen
from engine.attention.native import NativeAttention
from engine.attention.reference import ReferenceAttention, attend, visible_mask
from engine.attention.select import select
from engine.config import StartError
from engine.device import CPU, Device

CUDA = Device(torch.device("cuda", 0), "NVIDIA H200", 1 << 37, (9, 0))
SPEC = LayerSpec(num_query_heads=6, num_kv_heads=2, key_dim=64, value_dim=64)
SCALE = 0.125


class Dense:
    """A library in plain torch: rows it gets, keys of each sequence side by side, or blocks."""

    name = "dense"

    def __init__(self, page: int = 256) -> None:
        self.page = page
        self.calls: list[tuple[str, list[int]]] = []  # way, and keys of each sequence

    def serves(self, spec: LayerSpec, scale: float) -> bool:
        return True

    def reads_blocks(self, block_size: int) -> bool:
        return block_size % self.page == 0

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        lengths: Lengths,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        block_tables: Tensor | None = None,
    ) -> Tensor:
        queries, keys = lengths.query_start_loc.tolist(), lengths.key_start_loc.tolist()
        assert queries[-1] == len(query)
        assert torch.equal(lengths.key_start_loc.diff(), lengths.seq_lens)
        assert lengths.max_query_len == max(np.diff(queries))
        assert lengths.max_seq_len == int(lengths.seq_lens.max())
        way = "fresh" if queries == keys else "gathered" if block_tables is None else "blocks"
        self.calls.append((way, lengths.seq_lens.tolist()))
        out = torch.empty(len(query), query.shape[1], value.shape[-1], dtype=query.dtype)
        for s, length in enumerate(lengths.seq_lens.tolist()):
            begin, end = queries[s], queries[s + 1]
            if block_tables is None:
                rows = [part[keys[s] : keys[s + 1]] for part in (key, value)]
            else:
                blocks = block_tables[s, : -(-length // key.shape[1])].long()
                rows = [part[blocks].flatten(0, 1)[:length] for part in (key, value)]
            assert len(rows[0]) == length
            positions = torch.arange(length - (end - begin), length)
            visible = visible_mask(positions, 0, length, window, None)
            attended = attend(query[begin:end], rows[0].double(), rows[1].double(), visible, scale, softcap, None)
            out[begin:end] = attended.to(out.dtype)
        return out


def metadata(computed: list[int], counts: list[int], block_size: int, tables: Tensor) -> AttentionMetadata:
    ends = [c + n for c, n in zip(computed, counts, strict=True)]
    slots = [
        int(tables[s, p // block_size]) * block_size + p % block_size
        for s, (start, end) in enumerate(zip(computed, ends, strict=True))
        for p in range(start, end)
    ]
    return AttentionMetadata(
        block_tables=tables,
        query_start_loc=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        max_query_len=max(counts),
        max_seq_len=max(ends),
        host=HostLengths(np.array(counts, dtype=np.int32), np.array(ends, dtype=np.int32)),
    )


def layer_of(block_size: int, num_blocks: int = 12) -> PagedLayer:
    shape = (num_blocks, 2, block_size, 64)
    return PagedLayer(0, SPEC, torch.full(shape, torch.nan), torch.full(shape, torch.nan))


STEPS: list[tuple[list[int], list[int]]] = [  # computed before, tokens of this step; of three sequences
    ([0, 0, 0], [20, 7, 33]),  # all fresh
    ([20, 7, 33], [9, 1, 16]),  # two go on, one decodes
    ([29, 8, 49], [1, 1, 1]),  # all decode
    ([30, 9, 50], [2, 3, 4]),  # all go on
]


@pytest.mark.parametrize("options", [{}, {"window": 11}, {"softcap": 5.0}], ids=["plain", "window", "softcap"])
@pytest.mark.parametrize("page", [256, 16], ids=["copies", "reads blocks"])
def test_every_way_attends_as_the_reference(options: dict[str, Any], page: int) -> None:
    tables = torch.tensor([[3, 0, 5, 9], [2, -1, -1, -1], [7, 1, 8, 4]], dtype=torch.int32)
    library = Dense(page)
    backends = LibraryAttention(library, ReferenceAttention()), ReferenceAttention()
    layers = layer_of(16), layer_of(16)
    generator = torch.Generator().manual_seed(1)
    for computed, counts in STEPS:
        step = metadata(computed, counts, 16, tables)
        qkv = torch.randn(sum(counts), 10, 64, generator=generator)
        outputs = []
        for backend, layer in zip(backends, layers, strict=True):
            layer.metadata = step
            outputs.append(backend.forward(qkv[:, :6], qkv[:, 6:8], qkv[:, 8:], layer, scale=SCALE, **options))
        torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    way = "blocks" if page == 16 else "gathered"
    assert library.calls == [("fresh", [20, 7, 33]), (way, [29, 49]), (way, [32, 12, 54])]


def test_fresh_prompts_beside_others_go_by_their_own_keys() -> None:
    tables = torch.tensor([[3, 0], [2, 1], [7, 5]], dtype=torch.int32)
    library, layer, oracle = Dense(), layer_of(16), layer_of(16)
    for cache in (layer.key_cache, layer.value_cache, oracle.key_cache, oracle.value_cache):
        assert cache is not None
        cache.normal_(generator=torch.Generator().manual_seed(2))
    step = metadata([9, 0, 5], [4, 12, 1], 16, tables)
    layer.metadata = oracle.metadata = step
    qkv = torch.randn(17, 10, 64, generator=torch.Generator().manual_seed(3))
    parts = qkv[:, :6], qkv[:, 6:8], qkv[:, 8:]
    got = LibraryAttention(library, ReferenceAttention()).forward(*parts, layer, scale=SCALE)
    torch.testing.assert_close(got, ReferenceAttention().forward(*parts, oracle, scale=SCALE), rtol=1e-5, atol=1e-5)
    assert library.calls == [("fresh", [12]), ("gathered", [13])]


@pytest.mark.parametrize(
    "changes", [{"host": None}, {"sinks": torch.zeros(6)}, {"chunk": 16}], ids=["recorded", "sinks", "chunk"]
)
def test_what_the_library_does_not_serve_stays_with_the_base(changes: dict[str, Any]) -> None:
    library, layer = Dense(), layer_of(16)
    layer.metadata = metadata([0], [20], 16, torch.tensor([[3, 0]], dtype=torch.int32))
    options = {name: value for name, value in changes.items() if name != "host"}
    if "host" in changes:
        layer.metadata = replace(layer.metadata, host=None)
    qkv = torch.randn(20, 10, 64)
    LibraryAttention(library, ReferenceAttention()).forward(
        qkv[:, :6], qkv[:, 6:8], qkv[:, 8:], layer, scale=SCALE, **options
    )
    assert library.calls == []


def lengths() -> Lengths:
    starts = torch.tensor([0, 5], dtype=torch.int32)
    return Lengths(starts, starts, starts[1:], 5, 5)


def test_flash_attn_is_called_in_its_own_terms() -> None:
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    library = FlashAttention(lambda *args, **options: seen.append((args, options)) or args[0])
    rows = torch.zeros(5, 2, 64)
    library.attend(rows, rows, rows, lengths(), scale=0.5, window=8, softcap=None)
    library.attend(rows, rows, rows, lengths(), scale=0.5, window=None, softcap=3.0, block_tables=rows)
    (args, first), (_, second) = seen
    assert [a.shape[0] if isinstance(a, Tensor) else a for a in args] == [5, 5, 5, 2, 2, 5, 5]
    assert (first["softmax_scale"], first["causal"], first["window_size"], first["softcap"]) == (
        0.5,
        True,
        (7, 0),
        0.0,
    )
    assert first["block_table"] is None
    assert (second["window_size"], second["softcap"]) == ((-1, 0), 3.0)
    assert second["block_table"] is rows
    assert library.reads_blocks(256)
    assert not library.reads_blocks(16)
    assert not library.serves(replace(SPEC, key_dim=512, value_dim=512), 1.0)


def early(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
          is_causal: bool = False) -> Tensor:  # fmt: skip
    assert is_causal
    return query


def later(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor | None, max_q: int, max_k: int,
          *, scale: float | None = None, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
          seqused_k: Tensor | None = None, block_table: Tensor | None = None) -> Tensor:  # fmt: skip
    assert window_size == (6, 0)
    assert enable_gqa
    assert (cu_seq_k is None) == (block_table is not None) == (seqused_k is not None)
    return query * scale


def test_torch_varlen_is_used_as_far_as_it_goes() -> None:
    query, key = torch.ones(5, 6, 64), torch.ones(5, 2, 64)
    old, new = TorchVarlen(early), TorchVarlen(later)
    assert old.serves(SPEC, 0.125)
    assert not old.serves(SPEC, 0.5)
    assert not old.serves(replace(SPEC, window=7), 0.125)
    assert not old.reads_blocks(256)
    assert torch.equal(old.attend(query, key, key, lengths(), scale=0.125, window=None, softcap=None), query)
    assert new.serves(replace(SPEC, window=7), 0.5)
    assert not new.serves(replace(SPEC, softcap=2.0), 0.5)
    assert new.reads_blocks(256)
    for tables in (None, torch.zeros(1, 1, dtype=torch.int32)):
        out = new.attend(query, key, key, lengths(), scale=0.5, window=7, softcap=None, block_tables=tables)
        assert torch.equal(out, query * 0.5)


def test_native_is_the_default_everywhere() -> None:
    for device in (CPU, CUDA):
        assert isinstance(select("native", device), NativeAttention)


def test_a_library_needs_a_cuda_device() -> None:
    for name in ("flash-attn", "torch-varlen"):
        with pytest.raises(StartError, match=f"--attention-backend {name} needs a CUDA device"):
            select(name, CPU)  # type: ignore[arg-type]


def test_flash_attn_is_missed_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(StartError, match="needs the package flash-attn") as missing:
        select("flash-attn", CUDA)
    assert "\n" not in str(missing.value)


def test_another_backend_than_native_says_what_it_costs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = early  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    for name in ("flash-attn", "torch-varlen"):
        caplog.clear()
        backend = select(name, CUDA)  # type: ignore[arg-type]
        assert backend.name == name
        assert "may depend on other requests and on what is cached" in caplog.text
