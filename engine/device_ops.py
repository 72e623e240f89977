"""Typed wrappers over the ops of `torch.ops.pagemill` that only a device's path uses: batches made on the device,
edits of logits against state kept there, positions and cache in one pass, attention into buffers that are there.

As in engine/ops.py every op checks its arguments and raises RuntimeError; values that lie on the device (rows, slots,
lengths, ids) are not looked at, for that would wait for it. Outputs are passed in, nothing waits for the device, and
nothing here allocates, so every call can be captured in a graph. All tensors of a call lie on one device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.ops import NormVariant

_ops = torch.ops.pagemill


# ---- batches --------------------------------------------------------------------------------------------------


class BatchBuffers(NamedTuple):
    """What a forward reads, made by `prepare_batch`; each may be a view of a longer buffer."""

    input_ids: Tensor  # [num_tokens], int64
    positions: Tensor  # [num_tokens], int64
    slot_mapping: Tensor  # [num_tokens], int64; -1: padding
    query_start_loc: Tensor  # [num_seqs + 1], int32
    seq_lens: Tensor  # [num_seqs], int32; 0: padding
    block_tables: Tensor  # [num_seqs, width], int32, contiguous; padding's rows are zeros
    logits_indices: Tensor  # [num_seqs], int64: the last token of each sequence


def prepare_batch(
    token_ids: Tensor,  # [num_rows, max_tokens], int32
    row_tables: Tensor,  # [num_rows, max_blocks], int32, max_blocks >= width: the blocks of each row in order
    block_size: int,
    rows: Tensor,  # [num_seqs], int64: the row each sequence is in; negative: padding
    computed: Tensor,  # [num_seqs], int32: tokens whose K and V are in the cache
    counts: Tensor,  # [num_seqs], int32: tokens to compute, at least 1 (padding: 1)
    to: BatchBuffers,
) -> None:
    """Fill `to` for sequences that compute tokens [computed, computed + counts) of their rows.

    Padding computes `counts` tokens of id 0 at position 0 and slot -1, sees no key and writes none, so a batch is
    padded to a bucket by rows of -1. num_tokens must be the sum of counts; what lies behind is left alone."""
    _ops.prepare_batch(token_ids, row_tables, block_size, rows, computed, counts, *to)


def advance_batch(
    token_ids: Tensor,  # as in prepare_batch; the drawn ids are stored in it
    row_tables: Tensor,
    block_size: int,
    rows: Tensor,  # [num_seqs], int64; negative: padding
    drawn: Tensor,  # [num_seqs], int64: the id of each row; negative ones (rows that failed) count as 0
    num_seqs: Tensor,  # [1], int32: sequences in use; the others become padding
    to: BatchBuffers,  # of a batch of one token each; block_tables, query_start_loc and logits_indices are not touched
) -> None:
    """One decode step on without the host: every row gets its drawn id at position seq_lens, and the next forward's
    input_ids, positions, slot_mapping and seq_lens. The rows' tables already hold the block of the new token."""
    _ops.advance_batch(
        token_ids, row_tables, block_size, rows, drawn, num_seqs, to.input_ids, to.positions, to.slot_mapping,
        to.seq_lens,
    )  # fmt: skip


def store_tokens(token_ids: Tensor, rows: Tensor, positions: Tensor, drawn: Tensor) -> None:
    """token_ids[rows[i], positions[i]] = drawn[i]: rows, positions, drawn [n], int64. A negative row is skipped, a
    negative id (the row failed) is stored as 0."""
    _ops.store_tokens(token_ids, rows, positions, drawn)


# ---- edits of logits ------------------------------------------------------------------------------------------


def load_counts(
    counts: Tensor,  # [num_rows, vocab], int32: how often a row's output holds an id
    prompt_bits: Tensor,  # [num_rows, ceil(vocab / 32)], int32: bit id % 32 of word id / 32: the row's prompt holds it
    rows: Tensor,  # [n], int64, distinct; negative: skip
    token_ids: Tensor,  # [num_rows, max_tokens], int32; ids below vocab
    num_prompt: Tensor,  # [n], int32: tokens of the prompt
    num_tokens: Tensor,  # [n], int32: tokens in all
) -> None:
    """Counts and prompt bits of rows[i] anew, from the first num_tokens[i] ids of its row of token_ids."""
    _ops.load_counts(counts, prompt_bits, rows, token_ids, num_prompt, num_tokens)


def count_tokens(counts: Tensor, rows: Tensor, ids: Tensor) -> None:
    """counts[rows[i], ids[i]] += 1: rows, ids [n], int64; negative ones are skipped."""
    _ops.count_tokens(counts, rows, ids)


def apply_penalties(
    logits: Tensor,  # [n, vocab], float32, in place
    rows: Tensor,  # [n], int64: the row of counts and prompt_bits; negative: none
    counts: Tensor,  # as in load_counts
    prompt_bits: Tensor,
    presence: Tensor,  # [n], float32; 0: none
    frequency: Tensor,  # [n], float32; 0: none
    repetition: Tensor,  # [n], float32; 1: none
) -> None:
    """As engine.ops.Penalties says, to the bit."""
    _ops.apply_penalties(logits, rows, counts, prompt_bits, presence, frequency, repetition)


def add_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], ids[i]] += values[i], in place: logits [n, vocab] float32, rows and ids [k] int64, values [k]
    float32 (-inf bans). A negative row is skipped. Pairs should be distinct: repeated ones add up in any order."""
    _ops.add_bias(logits, rows, ids, values)


def apply_token_bitmask(logits: Tensor, masks: Tensor, mask_of: Tensor | None = None) -> None:
    """Logits [n, vocab] of ids whose bit is not set become -inf, in place.

    masks [num_masks, words], int32: bit id % 32 of word id / 32; ids past the last word are banned. mask_of [n]:
    int64, the mask of each row, -1 for none; None: row i has mask i."""
    _ops.apply_token_bitmask(logits, masks, mask_of)


# ---- queries, keys and the cache ------------------------------------------------------------------------------


class RotaryTables(NamedTuple):
    """Rotations of every position, in the dtype of the queries."""

    cos: Tensor  # [num_positions, rotary_dim]
    sin: Tensor  # likewise, the first half negated


class HeadNorms(NamedTuple):
    """An RMS norm over every head of queries and keys, before the rotation."""

    query_weight: Tensor  # [dim], in the dtype of the queries
    key_weight: Tensor
    eps: float
    variant: NormVariant  # not "layer"


class CacheScales(NamedTuple):
    """What K and V are divided by on their way into an e4m3 cache: one float32 each, [1]."""

    key: Tensor
    value: Tensor


def rotary(query: Tensor, key: Tensor, tables: RotaryTables, positions: Tensor) -> None:
    """Rotate query [num_tokens, query heads, dim] and key [num_tokens, kv heads, dim] in place: pairs (p, p +
    rotary_dim / 2); elements from rotary_dim on stay. Tokens may lie at a stride (a fused qkv); dim even, at most 512.

    positions [num_tokens], int64: rows of the tables. Products and their sum are rounded one by one."""
    _ops.rotary(query, key, *tables, positions)


def qk_norm(query: Tensor, key: Tensor, norms: HeadNorms, tables: RotaryTables | None, positions: Tensor) -> None:
    """The norm, then `rotary` (None: no rotation), in place in one pass."""
    cos, sin = tables or (None, None)
    _ops.qk_norm(query, key, *norms, cos, sin, positions)


def rope_and_cache(
    query: Tensor,  # [num_tokens, query heads, dim]; in place, as by qk_norm
    key: Tensor,  # [num_tokens, kv heads, dim]; likewise
    value: Tensor,  # [num_tokens, kv heads, value_dim]
    key_cache: Tensor,  # as in engine.ops.reshape_and_cache
    value_cache: Tensor,
    slot_mapping: Tensor,
    positions: Tensor,  # [num_tokens], int64
    *,
    tables: RotaryTables | None = None,
    norms: HeadNorms | None = None,
    scales: CacheScales | None = None,  # of e4m3 caches; None: 1
) -> None:
    """Norm and rotation where given, then K and V into the cache: the same bits as the ops one by one.

    Heads of a token are contiguous, tokens may lie at a stride."""
    _ops.rope_and_cache(
        query, key, value, *(norms or (None, None, 0.0, "llama")), *(tables or (None, None)), positions, key_cache,
        value_cache, slot_mapping, *(scales or (None, None)),
    )  # fmt: skip


# ---- attention ------------------------------------------------------------------------------------------------


def paged_attention_workspace(
    num_seqs: int, max_query_len: int, max_seq_len: int, num_query_heads: int, num_kv_heads: int, value_dim: int
) -> int:
    """Bytes that `paged_attention_into` needs for batches up to these sizes."""
    return int(
        _ops.paged_attention_workspace(num_seqs, max_query_len, max_seq_len, num_query_heads, num_kv_heads, value_dim)
    )


def paged_attention_into(
    out: Tensor,  # [num_tokens, query heads, value_dim]
    query: Tensor,  # this and the next five as in engine.ops.paged_attention
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    workspace: Tensor,  # [paged_attention_workspace(...)], uint8
    *,
    scale: float,
    max_query_len: int,  # bounds, not values: nothing longer may be in the batch
    max_seq_len: int,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    scales: CacheScales | None = None,  # of e4m3 caches, [1] or [kv heads]
) -> None:
    """As engine.ops.paged_attention, without an allocation and with lengths read on the device alone."""
    _ops.paged_attention_into(
        out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale, causal, window or 0,
        chunk or 0, softcap or 0.0, sinks, *(scales or (None, None)), workspace, max_query_len, max_seq_len,
    )  # fmt: skip
