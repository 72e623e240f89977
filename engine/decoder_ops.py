"""Typed wrappers over the ops of `torch.ops.pagemill` that make one native call of a whole forward: a decoder of the
Llama shape, kept in csrc behind a handle. As in engine/ops.py every op checks its arguments and raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops import ActivationKind, NormVariant

_ops = torch.ops.pagemill


def create(
    ends: Sequence[Tensor],  # embedding [vocabulary, hidden_size] or what embed_quant takes, last norm, packed head,
    # its bias or an empty tensor
    layers: Sequence[Tensor],  # the tensors of LayerTensors, layer by layer; an empty one: there is no such part
    *,
    sizes: Sequence[int],  # query heads, kv heads, head size, intermediate size, rows of the head
    is_gated: bool,  # the MLP's first product has a gate's rows and then as many others, else no gate
    is_parallel: bool,  # the MLP reads what attention reads, through the middle norm if there is one
    windows: Sequence[int],  # per layer: tokens a query sees, itself included; 0: all
    ropes: Sequence[int],  # per layer: which pair of tables; -1: none
    scale: float,
    softcap: float,  # of attention; 0: none
    embedding_scale: float,  # 1: none, as the next two
    residual_scale: float,  # what a half's result is multiplied by before it is added to the residual stream
    logits_scale: float,
    logits_softcap: float,  # as in shape_logits
    eps: Sequence[float],  # of the six norms of a layer and the last one
    variants: Sequence[NormVariant],  # likewise
    activation: ActivationKind,
) -> int:
    """A handle of a decoder that keeps these tensors alive until destroy; all of one dtype, biases of either.

    It computes what the ops of engine/ops.py compute when called one by one, to the bit."""
    handle: int = _ops.decoder_create(
        list(ends), list(layers), [*sizes, int(is_gated), int(is_parallel)], list(windows), list(ropes),
        [scale, softcap, embedding_scale, residual_scale, logits_scale, logits_softcap],
        list(eps), ",".join(variants), activation,
    )  # fmt: skip
    return handle


def adapt(
    handle: int,
    low_ranks: Sequence[Tensor],  # per layer A and B of qkv, output, gate_up and down, from pack_linear; empty: none
    ranks: Sequence[int],  # of each of these pairs; 0: none
) -> None:
    """One more adapter, which spans of forwards may name by its place from 1: tokens in them get (x A^T) B^T added to
    a product before it is rounded, and before its gate. B's rows are those of the weight, of a gated one as its panels
    hold them: 16 of the gate, then theirs of the up half, padding included."""
    _ops.decoder_adapt(handle, list(low_ranks), list(ranks))


def destroy(handle: int) -> None:
    """Let go of everything the handle keeps. A forward in progress ends first; unknown handles are ignored."""
    _ops.decoder_destroy(handle)


def step_bytes(handle: int, num_tokens: int, num_rows: int) -> int:
    """Memory that a step of so many tokens and rows of logits takes, for activations and logits; kept afterwards, the
    logits excepted."""
    return int(_ops.decoder_step_bytes(handle, num_tokens, num_rows))


def attach(
    handle: int,
    ropes: Sequence[Tensor],  # [num_positions, rotary_dim] each: cos, sin, cos, sin, ..., sin's first half negated
    key_caches: Sequence[Tensor],  # per layer, as in reshape_and_cache; all with the same number of blocks
    value_caches: Sequence[Tensor],
) -> None:
    """What later forwards read and write, until the next call."""
    _ops.decoder_attach(handle, list(ropes), list(key_caches), list(value_caches))


def forward(
    handle: int,
    input_ids: Tensor,  # [num_tokens], int64
    positions: Tensor,  # [num_tokens], int64: rows of the rotary tables
    block_tables: Tensor,  # as in paged_attention
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,  # as in reshape_and_cache
    logits_indices: Tensor | None,  # [num_rows], int64: tokens, in any order and number
    spans: Sequence[int] = (),  # three numbers each, ascending: adapter from 1, first token, end
) -> Tensor:
    """One step: logits [num_rows, vocabulary], float32; without indices the hidden states [num_tokens, hidden_size]
    behind the last norm. K and V of every token go to the caches. Runs on torch.get_num_threads() threads of csrc's
    own, the calling one among them, without the interpreter's lock."""
    out: Tensor = _ops.decoder_forward(
        handle, input_ids, positions, block_tables, query_start_loc, seq_lens, slot_mapping, logits_indices, spans
    )
    return out
