"""The ops of engine/device_ops.py in plain torch, for CPU tensors: what a device's path is tested with where there is
none, and what the kernels of csrc/cuda are compared with.

`on_cpu` registers them under the names of torch.ops.pagemill; tests ask for the fixture `device_ops_on_cpu`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, library

from engine import ops


@contextmanager
def on_cpu() -> Iterator[None]:
    """While it lasts, engine.device_ops takes CPU tensors."""
    own = library.Library("pagemill", "IMPL")
    for function in OPS:
        own.impl(function.__name__, function, "CPU")
    of_no_device = ("pagemill::paged_attention_workspace", "CompositeExplicitAutograd")
    if not torch._C._dispatch_has_kernel_for_dispatch_key(*of_no_device):  # it has one where _C_cuda is loaded
        own.impl("paged_attention_workspace", paged_attention_workspace, of_no_device[1])
    try:
        yield
    finally:
        own._destroy()


@pytest.fixture
def device_ops_on_cpu() -> Iterator[None]:
    with on_cpu():
        yield


# ---- batches --------------------------------------------------------------------------------------------------


def _slots(row_tables: Tensor, block_size: int, rows: Tensor, positions: Tensor) -> Tensor:
    return row_tables[rows, positions // block_size].long() * block_size + positions % block_size


def prepare_batch(
    token_ids: Tensor, row_tables: Tensor, block_size: int, rows: Tensor, computed: Tensor, counts: Tensor,
    input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    block_tables: Tensor, logits_indices: Tensor,
) -> None:  # fmt: skip
    ends = counts.long().cumsum(0)
    total = int(ends[-1]) if len(ends) else 0
    row_of = rows.repeat_interleave(counts.long())
    is_padding = row_of < 0
    place = torch.arange(total) + (computed.long() - (ends - counts)).repeat_interleave(counts.long())
    place = place.masked_fill(is_padding, 0)
    row_of = row_of.clamp(min=0)
    input_ids[:total] = token_ids[row_of, place].long().masked_fill(is_padding, 0)
    positions[:total] = place
    slot_mapping[:total] = _slots(row_tables, block_size, row_of, place).masked_fill(is_padding, -1)
    query_start_loc[0] = 0
    query_start_loc[1:] = ends
    seq_lens.copy_((computed + counts).masked_fill(rows < 0, 0))
    width = block_tables.shape[1]
    block_tables.copy_(row_tables[rows.clamp(min=0), :width].masked_fill((rows < 0)[:, None], 0))
    logits_indices.copy_(ends - 1)


def advance_batch(
    token_ids: Tensor, row_tables: Tensor, block_size: int, rows: Tensor, drawn: Tensor, num_seqs: Tensor,
    input_ids: Tensor, positions: Tensor, slot_mapping: Tensor, seq_lens: Tensor,
) -> None:  # fmt: skip
    used = (torch.arange(len(rows)) < num_seqs) & (rows >= 0)
    row_of, place = rows.clamp(min=0), seq_lens.long().masked_fill(~used, 0)
    ids = drawn.clamp(min=0).masked_fill(~used, 0)
    token_ids[rows[used], place[used]] = ids[used].int()
    input_ids.copy_(ids)
    positions.copy_(place)
    slot_mapping.copy_(_slots(row_tables, block_size, row_of, place).masked_fill(~used, -1))
    seq_lens.copy_(torch.where(used, place + 1, 0))


def store_tokens(token_ids: Tensor, rows: Tensor, positions: Tensor, drawn: Tensor) -> None:
    used = rows >= 0
    token_ids[rows[used], positions[used]] = drawn[used].clamp(min=0).int()


# ---- edits of logits ------------------------------------------------------------------------------------------


def _bits(words: Tensor, count: int) -> Tensor:
    """[..., words] int32 -> [..., count] bool, lowest bit first; ids past the last word have none."""
    bits = (words.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32) & 1).bool().flatten(-2)[..., :count]
    return torch.nn.functional.pad(bits, (0, count - bits.shape[-1]))


def load_counts(
    counts: Tensor, prompt_bits: Tensor, rows: Tensor, token_ids: Tensor, num_prompt: Tensor, num_tokens: Tensor
) -> None:
    vocab = counts.shape[1]
    for row, prompt, end in zip(rows.tolist(), num_prompt.tolist(), num_tokens.tolist(), strict=True):
        if row < 0:
            continue
        counts[row] = torch.bincount(token_ids[row, prompt:end], minlength=vocab).int()
        held = torch.zeros(prompt_bits.shape[1] * 32, dtype=torch.int64)
        held[token_ids[row, : min(prompt, end)].long()] = 1
        words = (held.view(-1, 32) << torch.arange(32)).sum(1)
        prompt_bits[row] = torch.where(words >= 2**31, words - 2**32, words).int()


def count_tokens(counts: Tensor, rows: Tensor, ids: Tensor) -> None:
    used = (rows >= 0) & (ids >= 0)
    counts.index_put_((rows[used], ids[used]), torch.ones(1, dtype=torch.int32), accumulate=True)


def apply_penalties(
    logits: Tensor, rows: Tensor, counts: Tensor, prompt_bits: Tensor, presence: Tensor, frequency: Tensor,
    repetition: Tensor,
) -> None:  # fmt: skip
    here, vocab = rows.clamp(min=0), logits.shape[1]
    times = counts[here]
    known = ((times > 0) | _bits(prompt_bits[here], vocab)) & (rows >= 0)[:, None]
    factor = repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    edited = torch.where(known & (factor != 1), repeated, logits)
    lower = presence[:, None] + frequency[:, None] * times.float()
    logits.copy_(torch.where(known & (times > 0), edited - lower, edited))


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    used = rows >= 0
    logits.index_put_((rows[used], ids[used]), values[used], accumulate=True)


def apply_token_bitmask(logits: Tensor, masks: Tensor, mask_of: Tensor | None) -> None:
    if mask_of is None:
        mask_of = torch.arange(len(logits))
    allowed = _bits(masks[mask_of.clamp(min=0)], logits.shape[1]) | (mask_of < 0)[:, None]
    logits.masked_fill_(~allowed, -torch.inf)


# ---- queries, keys and the cache ------------------------------------------------------------------------------


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    width = cos.shape[1]
    turned = heads[..., :width]
    swapped = turned.roll(width // 2, -1)
    turned.copy_(turned * cos[positions].unsqueeze(1) + swapped * sin[positions].unsqueeze(1))


def _norm(heads: Tensor, weight: Tensor, eps: float, variant: str) -> None:
    x = heads.float()
    scaled = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    if variant == "llama":
        heads.copy_(scaled.to(heads.dtype) * weight)
    else:
        heads.copy_(scaled * (weight.float() + 1 if variant == "gemma" else weight.float()))


def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    _rotate(query, cos, sin, positions)
    _rotate(key, cos, sin, positions)


def qk_norm(
    query: Tensor, key: Tensor, query_weight: Tensor, key_weight: Tensor, eps: float, variant: str,
    cos: Tensor | None, sin: Tensor | None, positions: Tensor,
) -> None:  # fmt: skip
    _norm(query, query_weight, eps, variant)
    _norm(key, key_weight, eps, variant)
    if cos is not None and sin is not None:
        rotary(query, key, cos, sin, positions)


def rope_and_cache(
    query: Tensor, key: Tensor, value: Tensor, query_weight: Tensor | None, key_weight: Tensor | None, eps: float,
    variant: str, cos: Tensor | None, sin: Tensor | None, positions: Tensor, key_cache: Tensor, value_cache: Tensor,
    slot_mapping: Tensor, key_scale: Tensor | None, value_scale: Tensor | None,
) -> None:  # fmt: skip
    if query_weight is not None and key_weight is not None:
        qk_norm(query, key, query_weight, key_weight, eps, variant, cos, sin, positions)
    elif cos is not None and sin is not None:
        rotary(query, key, cos, sin, positions)
    reshape_and_cache_scaled(key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale)


def reshape_and_cache_scaled(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    key_scale: Tensor | None, value_scale: Tensor | None,
) -> None:  # fmt: skip
    assert key_scale is value_scale is None, "the CPU has no e4m3 cache"
    ops.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


# ---- attention ------------------------------------------------------------------------------------------------


def paged_attention_workspace(
    num_seqs: int, max_query_len: int, max_seq_len: int, num_query_heads: int, num_kv_heads: int, value_dim: int
) -> int:
    return 16  # the CPU's attention needs none


def paged_attention_into(
    out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, query_start_loc: Tensor,
    seq_lens: Tensor, scale: float, causal: bool, window: int, chunk: int, softcap: float, sinks: Tensor | None,
    key_scale: Tensor | None, value_scale: Tensor | None, workspace: Tensor, max_query_len: int, max_seq_len: int,
) -> None:  # fmt: skip
    assert key_scale is value_scale is None, "the CPU has no e4m3 cache"
    assert seq_lens.le(max_seq_len).all(), "a sequence is longer than the bound"
    assert query_start_loc.diff().le(max_query_len).all(), "more queries than the bound"
    ops.paged_attention(
        query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale=scale, causal=causal,
        window=window or None, chunk=chunk or None, softcap=softcap or None, sinks=sinks, out=out,
    )  # fmt: skip


OPS: tuple[Callable[..., Any], ...] = (
    add_bias, advance_batch, apply_penalties, apply_token_bitmask, count_tokens, load_counts, paged_attention_into,
    prepare_batch, qk_norm, reshape_and_cache_scaled, rope_and_cache, rotary, store_tokens,
)  # fmt: skip
