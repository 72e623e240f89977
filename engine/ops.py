"""Typed wrappers over `torch.ops.pagemill`, the compiled ops of csrc/; nothing but this, decoder_ops.py and
device_ops.py touches torch.ops. Tensors on a CUDA device go to the kernels of csrc/cuda, of the same signature.

Every op checks its arguments and raises RuntimeError with a message that names the op, the argument, what was
wanted and what came. Tensors live on the CPU and are float32 or bfloat16 unless said otherwise. In every op the
order in which one output row is accumulated depends on that row alone, so its bits do not change with the other
rows or the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from engine.ops_library import load, load_cuda

LIBRARY, CUDA_LIBRARY = load(), load_cuda()
_ops = torch.ops.pagemill


# ---- instruction-set level ------------------------------------------------------------------------------------


def isa() -> str:
    """The active level: "portable"; on x86 "avx2", "avx512", "avx512_bf16", "amx" (or "amx_emulated", which only
    tests choose); on Arm "neon", "neon_bf16"."""
    return str(_ops.isa())


def isa_levels() -> tuple[str, ...]:
    """The levels this machine and this build have, worst to best, then those that only tests choose."""
    return tuple(_ops.isa_levels().split(","))


def set_isa(name: str) -> None:
    """Pin the level for this process ("auto": the best). To be called before weights are packed or caches filled."""
    _ops.set_isa(name)


# ---- paged KV cache -------------------------------------------------------------------------------------------


def reshape_and_cache(
    key: Tensor,  # [num_tokens, num_kv_heads, key_dim]; the last dimension contiguous
    value: Tensor,  # [num_tokens, num_kv_heads, value_dim]; likewise
    key_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, key_dim]; blocks contiguous, free stride between
    value_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, value_dim]; likewise
    slot_mapping: Tensor,  # [num_tokens], int64: block_id * block_size + offset; negative: skip
) -> None:
    """Write K and V rows into the cache. One dtype for all but slot_mapping; in bfloat16 key_dim must be even.

    The order of elements inside a (block, head) is private to csrc (csrc/cpu/cache.h)."""
    _ops.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)


def paged_attention(
    query: Tensor,  # [num_tokens, num_query_heads, key_dim]; the last dimension contiguous
    key_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, key_dim], filled by reshape_and_cache
    value_cache: Tensor,  # [num_blocks, num_kv_heads, block_size, value_dim]; likewise
    block_tables: Tensor,  # [num_seqs, max_blocks], int32; entries no query sees may be -1
    query_start_loc: Tensor,  # [num_seqs + 1], int32, from 0
    seq_lens: Tensor,  # [num_seqs], int32: keys visible to the last query, itself included
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,  # tokens a query sees, itself included
    chunk: int | None = None,  # attention within absolute chunks of this length
    softcap: float | None = None,
    sinks: Tensor | None = None,  # [num_query_heads], float32: a logit per head that takes mass and has no value
    out: Tensor | None = None,  # [num_tokens, num_query_heads, value_dim]
) -> Tensor:
    """Attention of one ragged batch of prompt chunks and decodes over the block tables.

    Query i of a sequence stands at position seq_len - query_len + i. Returns `out` (new unless given), in query's
    dtype, which is the caches' too; rows that see no key, and rows past the last sequence, are zeros."""
    if out is None:
        out = query.new_empty((query.shape[0], query.shape[1], value_cache.shape[3]))
    _ops.paged_attention(
        out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale, causal,
        window or 0, chunk or 0, softcap or 0.0, sinks,
    )  # fmt: skip
    return out


def copy_blocks(caches: Sequence[Tensor], pairs: Tensor) -> None:
    """Copy whole blocks inside every layer's cache: pairs [n, 2], int64, (source, destination).

    caches: one contiguous tensor per layer, [num_blocks, ...] of any dtype; only the bytes of a block matter.
    Destinations must be distinct and no block may be both source and destination."""
    _ops.copy_blocks(list(caches), pairs)


def _check_staging(caches: Sequence[Tensor], staging: Tensor) -> None:
    if caches and caches[0].is_cuda and not (staging.is_cuda or staging.is_pinned()):
        raise RuntimeError("staging: wanted memory of the device or pinned memory, got pageable memory")


def gather_blocks(caches: Sequence[Tensor], ids: Tensor, staging: Tensor) -> None:
    """Bytes of blocks `ids` ([n], int64) of every layer into staging, uint8 [n, bytes of one block in all layers].

    On a device staging lies there or in pinned memory of the host, which the device writes by itself: the bytes are
    there when its stream has come so far. RuntimeError for other memory."""
    _check_staging(caches, staging)
    _ops.gather_blocks(list(caches), ids, staging)


def scatter_blocks(caches: Sequence[Tensor], ids: Tensor, staging: Tensor) -> None:
    """The reverse of gather_blocks; ids must be distinct."""
    _check_staging(caches, staging)
    _ops.scatter_blocks(list(caches), ids, staging)


# ---- linear layers --------------------------------------------------------------------------------------------


ActivationKind = Literal["silu", "gelu", "gelu_tanh"]
"""gelu is the exact one (error function), gelu_tanh the approximation through tanh."""


def pack_linear(weight: Tensor, *, gated: bool = False) -> Tensor:
    """The weight [out_features, in_features] (float32 or bfloat16) in the order `linear` reads: panels of 32 output
    features, zero-padded. Packed once at load; the layout is the same at every instruction-set level.

    gated: [2 * out_features, in_features], gate first, packed for a `linear` with an activation."""
    packed: Tensor = _ops.pack_linear(weight, gated)
    return packed


def linear(
    x: Tensor,  # [M, in_features] in the weight's dtype; the last dimension contiguous, rows at any stride
    packed: Tensor,  # from pack_linear
    bias: Tensor | None,  # [out_features], gated [2 * out_features]; float32 or bfloat16
    out_features: int,
    *,
    out_dtype: torch.dtype | None = None,  # float32, or the dtype of x (None)
    activation: ActivationKind | None = None,  # for a gated weight
    residual: Tensor | None = None,  # [M, out_features] in out's dtype, contiguous; not with an activation
) -> Tensor:  # [M, out_features]
    """x @ weight.T + bias, summed in float32 in ascending order of in_features, rounded once.

    With an activation: activation(gate half) * up half, with a residual: residual + it, each bit for bit as the
    separate operations on the rounded product would give. A row's bits do not depend on the other rows, their number,
    or the number of threads."""
    if out_dtype not in (None, torch.float32, x.dtype):
        raise RuntimeError(f"pagemill.linear: out_dtype: wanted torch.float32 or {x.dtype}, got {out_dtype}")
    out: Tensor = _ops.linear(x, packed, bias, out_features, out_dtype is torch.float32, activation, residual)
    return out


def pack_linear_quant(
    values: Tensor,  # [out_features, in_features], uint8: from 0 to 255, or from 0 to 15 with bits=4
    scales: Tensor,  # [out_features, groups], float16: one per 32 in_features, the last group may be shorter
    minimums: Tensor | None,  # likewise; None: 128, or 8 with bits=4, is the value that means zero
    bits: int,  # 8 or 4
    *,
    gated: bool = False,  # as in pack_linear
) -> Tensor:
    """A weight scale * value + minimum, or scale * (value - zero), in the order `linear_quant` reads: panels of 32
    output features, a group's scales beside its values. The layout is the same at every instruction-set level."""
    packed: Tensor = _ops.pack_linear_quant(values, scales, minimums, bits, gated)
    return packed


def linear_quant(
    x: Tensor,  # [M, in_features], float32 or bfloat16; the last dimension contiguous, rows at any stride
    packed: Tensor,  # from pack_linear_quant
    bias: Tensor | None,  # [out_features], gated [2 * out_features]; float32
    out_features: int,
    *,
    out_dtype: torch.dtype | None = None,  # float32, or the dtype of x (None)
    activation: ActivationKind | None = None,  # for a gated weight
) -> Tensor:  # [M, out_features]
    """x @ weight.T + bias with a quantised weight; with an activation as in `linear`.

    Every group of 32 values of a row of x is rounded to 8 bits of its own scale (largest magnitude / 127); the group's
    product is then an exact integer, and groups are added in ascending order in float32. So a row's bits do not depend
    on the other rows, their number, or the number of threads. A row with a value that is not finite is NaN."""
    if out_dtype not in (None, torch.float32, x.dtype):
        raise RuntimeError(f"pagemill.linear_quant: out_dtype: wanted torch.float32 or {x.dtype}, got {out_dtype}")
    out: Tensor = _ops.linear_quant(x, packed, bias, out_features, out_dtype is torch.float32, activation)
    return out


def embed_quant(
    ids: Tensor,  # [num_tokens], int64, from 0 to vocab_size - 1
    packed: Tensor,  # a weight [vocab_size, hidden_size] from pack_linear_quant, not gated
    like: Tensor,  # [hidden_size], float32 or bfloat16: gives the result's dtype
    vocab_size: int,
) -> Tensor:  # [num_tokens, hidden_size]
    """Rows of a quantised weight as numbers, computed in float32 and rounded once."""
    out: Tensor = _ops.embed_quant(ids, packed, like, vocab_size)
    return out


# ---- norms and activations ------------------------------------------------------------------------------------


NormVariant = Literal["llama", "gemma", "f32", "layer"]
"""Where values are rounded to x's dtype. llama: x * scale, then the product with the weight. gemma: once, after
x * scale * (1 + weight). f32: once, after x * scale * weight. scale = 1 / sqrt(mean(x^2) + eps), in float32.
layer: layer norm instead, its mean taken away first; the weight is [2, dim], a row of weights and a row of biases."""


def rms_norm(x: Tensor, weight: Tensor, eps: float, variant: NormVariant) -> Tensor:
    """x [..., dim] normalised over its last dimension, weight [dim] (layer: [2, dim]) of the same dtype, or bfloat16
    beside a float32 x: the result has the weight's dtype.

    x may have strides in up to two leading dimensions (heads of a fused qkv); the result is contiguous."""
    out: Tensor = _ops.rms_norm(x, weight, eps, variant)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: NormVariant) -> Tensor:
    """residual += x (rounded to its dtype), then rms_norm of the sum. residual: x's shape and dtype, contiguous."""
    out: Tensor = _ops.fused_add_rms_norm(x, residual, weight, eps, variant)
    return out


def activation(x: Tensor, kind: ActivationKind) -> Tensor:
    """Element by element on a contiguous tensor of any shape, computed in float32."""
    out: Tensor = _ops.activation(x, kind)
    return out


def silu_and_mul(x: Tensor) -> Tensor:
    """x [..., 2 * width], contiguous: silu(x[..., :width]) * x[..., width:], the first factor rounded to x's dtype."""
    out: Tensor = _ops.gated_activation(x, "silu")
    return out


def gelu_and_mul(x: Tensor) -> Tensor:
    """As silu_and_mul, with the exact GELU."""
    out: Tensor = _ops.gated_activation(x, "gelu")
    return out


def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """As silu_and_mul, with the tanh GELU."""
    out: Tensor = _ops.gated_activation(x, "gelu_tanh")
    return out


ACTIVATE_AND_MULTIPLY: dict[ActivationKind, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu": gelu_and_mul,
    "gelu_tanh": gelu_tanh_and_mul,
}


def shape_logits(logits: Tensor, scale: float, softcap: float) -> None:
    """In place, float32, contiguous: scale * logits, or softcap * tanh(scale * logits / softcap) unless that is 0."""
    _ops.shape_logits(logits, scale, softcap)


# ---- sampling -------------------------------------------------------------------------------------------------


class Penalties(NamedTuple):
    """Per row three factors, and the tokens they look at: flat, rows one after the other.

    An id among a row's tokens: a positive logit is divided by the repetition penalty, another one multiplied by it.
    Then an id that is n times among the output tokens: presence + frequency * n is subtracted."""

    values: Tensor  # [rows, 3], float32: repetition (1: none), presence, frequency (0: none)
    token_ids: Tensor  # [num_tokens], int32
    token_starts: Tensor  # [rows + 1], int64; a row without tokens is left alone
    output_starts: Tensor  # [rows], int64: where, in token_ids, the row's prompt ends


class Biases(NamedTuple):
    """Numbers added to logits (-inf bans), flat, rows one after the other."""

    ids: Tensor  # [num_biases], int32
    values: Tensor  # [num_biases], float32
    starts: Tensor  # [rows + 1], int64


class Masks(NamedTuple):
    """Which ids may follow, one bit each, lowest first."""

    words: Tensor  # [num_masks, at least vocab / 32], int32
    of: Tensor  # [rows], int64: the row's mask; -1: none


class Drawn(NamedTuple):
    """Where `sample` tells what a row was drawn from: edited logits less their maximum over the temperature, -inf for
    what top-k, top-p and min-p leave out; of a greedy row the edited logits as they are."""

    logits: Tensor  # [num_told, vocab], float32, contiguous; not written where no id is drawn
    of: Tensor  # [rows], int64: the row in `logits`; -1: not told


def sample(
    logits: Tensor,  # [logit rows, vocab], float32; -inf bans an id
    temperature: Tensor,  # [rows], float32, > 0 (not read where greedy)
    top_k: Tensor,  # [rows], int32; 0 or less: no limit
    top_p: Tensor,  # [rows], float32, from 0 to 1
    min_p: Tensor,  # [rows], float32, from 0 to 1
    greedy: Tensor,  # [rows], bool or uint8: the most likely id, the lowest among equals
    seed_keys: Tensor,  # [rows], int64: the bits of engine.sampling.philox.seed_key
    positions: Tensor,  # [rows], int64: where the drawn token will stand in its sequence
    *,
    source: Tensor | None = None,  # [rows], int64: the logit row of each row; None: its own number
    rows: Sequence[int]
    | None = None,  # where in temperature to seed_keys, which are longer then, each row has its own
    penalties: Penalties | None = None,
    biases: Biases | None = None,
    masks: Masks | None = None,
    drawn: Drawn | None = None,
) -> Tensor:  # [rows], int64
    """One id per row, by docs/randomness.md to the bit; -1 where a row holds NaN, +inf or nothing finite, -2 where an
    edit names an id outside the vocabulary.

    Edits are made on a copy of the row, in the order penalties, biases, mask; logits stay as they are. Where they
    leave nothing that a row's mask allows, the mask alone counts."""
    given = (logits, temperature, top_k, top_p, min_p, greedy, seed_keys, positions)
    if all(part is None for part in (source, rows, penalties, biases, masks, drawn)):
        ids: Tensor = _ops.sample(*given)
    else:
        ids = _ops.sample_edited(
            *given, source, *(penalties or (None,) * 4), *(biases or (None,) * 3), *(masks or (None,) * 2),
            *(drawn or (None,) * 2), rows,
        )  # fmt: skip
    return ids


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """log_softmax(logits) at ids: logits [rows, vocab] float32, ids [rows, num_ids] int64 -> [rows, num_ids] float32.

    The sum is taken in float64. NaN where a row holds NaN or +inf; -inf for a banned id."""
    logprobs: Tensor = _ops.logprobs_of(logits, ids)
    return logprobs


class TopLogprobs(NamedTuple):
    """What `logprobs_topn` tells of each row."""

    logprobs: Tensor  # [rows, num_ids], float32: as logprobs_of
    top_ids: Tensor  # [rows, num_top], int64: most likely first, of equal ones the lower id
    top_logprobs: Tensor  # [rows, num_top], float32; -inf where fewer ids are not banned (their top_ids are 0)
    ranks: Tensor  # [rows], int32: of the first of ids, 1 for the most likely; empty unless asked for


def logprobs_topn(
    logits: Tensor,  # [logit rows, vocab], float32
    ids: Tensor,  # [rows, num_ids], int64; num_ids may be 0
    num_top: int,  # as many as the vocabulary has, at most
    *,
    source: Tensor | None = None,  # [rows], int64: the logit row of each row; None: its own number
    ranks: bool = False,
) -> TopLogprobs:
    """Log probabilities of given ids and of the most likely ones; all NaN of a row that holds NaN or +inf."""
    return TopLogprobs(*_ops.logprobs_topn(logits, ids, num_top, source, ranks))
