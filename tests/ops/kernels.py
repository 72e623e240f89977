"""The kernels of csrc/cuda behind the signatures of engine.ops, so that one list of cases serves the CPU's ops, the
emulated CUDA kernels and those on a GPU.

Arguments are CPU tensors everywhere. For a GPU they are carried over with their strides, and what a kernel changes in
place is carried back. Outputs start as NaN or -1.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from engine import ops
from engine.ops import ActivationKind, NormVariant, TopLogprobs
from tests.emulation.build import ROOT
from tests.emulation.launchers import CODES, Argument, DeviceLaunchers, EmulatedLaunchers, Launchers

SEEDS = (0, 1, 2)
EMULATED = tuple(f"emulated-{seed}" for seed in SEEDS)
LAUNCHED = (*EMULATED, "cuda")
VARIANTS: tuple[NormVariant, ...] = get_args(NormVariant)
KINDS: tuple[ActivationKind, ...] = get_args(ActivationKind)


@functools.cache
def _emulated() -> EmulatedLaunchers:
    given = os.environ.get("PAGEMILL_EMULATED_LIBRARY")  # the mutation proof's, or one with AddressSanitizer
    return EmulatedLaunchers(Path(given) if given else None)


@functools.cache
def _device() -> DeviceLaunchers:
    found = [
        p for p in (ROOT / "engine" / "_C_cuda.so", *sorted((ROOT / "build").glob("*/_C_cuda.so"))) if p.is_file()
    ]
    return DeviceLaunchers(max(found, key=lambda path: path.stat().st_mtime_ns))


@contextmanager
def kernels_of(name: str) -> Iterator[Any]:
    """engine.ops pinned to an instruction-set level, or a LaunchedOps."""
    if name == "cuda":
        yield LaunchedOps(_device(), "cuda")
    elif name in EMULATED:
        launchers = _emulated()
        launchers.set_seed(SEEDS[EMULATED.index(name)])
        yield LaunchedOps(launchers, "cpu")
    else:
        ops.set_isa(name)
        yield ops
        ops.set_isa("auto")


def flat(tensor: Tensor) -> Tensor:
    """All of the storage that a tensor is a view of, [elements]."""
    return tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


class LaunchedOps:
    """Every method has the meaning of the function of its name in engine.ops, or of the launcher in csrc/cuda."""

    def __init__(self, launchers: Launchers, device: str) -> None:
        self.launchers, self.device = launchers, device

    def launch(self, name: str, *arguments: Argument, changes: Sequence[Tensor] = ()) -> None:
        """changes: those of the arguments that the kernel writes to."""
        moved: dict[int, Tensor] = {}  # by storage: views of one buffer stay views of one buffer

        def carried(argument: Argument) -> Argument:
            if not isinstance(argument, Tensor) or self.device == "cpu":
                return argument
            key = argument.untyped_storage().data_ptr()
            if key not in moved:
                moved[key] = flat(argument).view(torch.uint8).to(self.device)
            whole = moved[key].view(argument.dtype)
            return whole.as_strided(argument.shape, argument.stride(), argument.storage_offset())

        there = [carried(argument) for argument in arguments]
        self.launchers.launch(name, *there)
        if self.device != "cpu":
            torch.cuda.synchronize()
            for tensor in changes:
                flat(tensor).view(torch.uint8).copy_(moved[tensor.untyped_storage().data_ptr()])

    # ---- norms and activations ------------------------------------------------------------------------------------

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, variant: NormVariant) -> Tensor:
        out = torch.full(x.shape, torch.nan, dtype=weight.dtype)
        dim = x.shape[-1]
        inner, outer_stride, inner_stride = 1, x.stride(0) if x.dim() > 1 else 0, dim
        if x.dim() == 3:
            inner, inner_stride = max(1, x.shape[1]), x.stride(1)
        self.launch(
            "rms_norm", x, weight, residual, out, x.numel() // dim, inner, outer_stride, inner_stride, dim, float(eps),
            VARIANTS.index(variant), CODES[x.dtype], CODES[weight.dtype],
            changes=[out] if residual is None else [out, residual],
        )  # fmt: skip
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, variant: NormVariant) -> Tensor:
        return self._norm(x, None, weight, eps, variant)

    def fused_add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, variant: NormVariant
    ) -> Tensor:
        return self._norm(x, residual, weight, eps, variant)

    def activation(self, x: Tensor, kind: ActivationKind) -> Tensor:
        out = torch.full(x.shape, torch.nan, dtype=x.dtype)
        self.launch("activation", x, out, x.numel(), KINDS.index(kind), CODES[x.dtype], changes=[out])
        return out

    def _gated(self, x: Tensor, kind: ActivationKind) -> Tensor:
        width = x.shape[-1] // 2
        out = torch.full((*x.shape[:-1], width), torch.nan, dtype=x.dtype)
        rows = x.numel() // x.shape[-1]
        self.launch("gated_activation", x, out, rows, width, KINDS.index(kind), CODES[x.dtype], changes=[out])
        return out

    def silu_and_mul(self, x: Tensor) -> Tensor:
        return self._gated(x, "silu")

    def gelu_and_mul(self, x: Tensor) -> Tensor:
        return self._gated(x, "gelu")

    def gelu_tanh_and_mul(self, x: Tensor) -> Tensor:
        return self._gated(x, "gelu_tanh")

    # ---- linear layers --------------------------------------------------------------------------------------------

    def linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        out_dtype: torch.dtype | None = None,
        activation: ActivationKind | None = None,
        residual: Tensor | None = None,
        workspace_bytes: int | None = None,
    ) -> Tensor:
        """weight [out_features, in_features] as it is, rows at any stride; with an activation [2 * out_features, ...].
        workspace_bytes: None for as many as the launcher's companion says."""
        out_features, dtype = weight.shape[0] // (1 if activation is None else 2), out_dtype or x.dtype
        out = torch.full((len(x), out_features), torch.nan, dtype=dtype)
        if workspace_bytes is None:
            workspace_bytes = self.launchers.number("linear_workspace", len(x), *weight.shape)
        workspace = torch.full((workspace_bytes,), 0xFF, dtype=torch.uint8)
        self.launch(
            "linear", out, x, weight, bias, residual, workspace, workspace_bytes, len(x), out_features, x.shape[1],
            x.stride(0), weight.stride(0), activation is not None, KINDS.index(activation or "silu"),
            dtype == torch.float32, CODES[x.dtype if bias is None else bias.dtype], CODES[x.dtype], changes=[out],
        )  # fmt: skip
        return out

    # ---- the paged cache ------------------------------------------------------------------------------------------

    def reshape_and_cache(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
    ) -> None:
        tokens, heads, key_dim = key.shape
        self.launch(
            "reshape_and_cache", key, value, key_cache, value_cache, slot_mapping, key_scale, value_scale, tokens,
            heads, key_cache.shape[2], key_dim, value.shape[2], key.stride(0), key.stride(1), value.stride(0),
            value.stride(1), key_cache.stride(0), value_cache.stride(0), CODES[key.dtype], CODES[key_cache.dtype],
            changes=[key_cache, value_cache],
        )  # fmt: skip

    def _blocks(self, name: str, caches: Sequence[Tensor], ids: Tensor, staging: Tensor | None) -> None:
        there = [cache.to(self.device) for cache in caches]
        sizes = [cache[0].numel() * cache.element_size() for cache in caches]
        offsets = torch.tensor([0, *sizes]).cumsum(0)  # these two stay with the host
        bases = torch.tensor([cache.data_ptr() for cache in there], dtype=torch.int64)
        tail: list[Argument] = [] if staging is None else [staging]
        self.launch(
            name, bases.data_ptr(), offsets.data_ptr(), len(caches), ids, ids.shape[0], *tail,
            changes=[] if staging is None else [staging],
        )  # fmt: skip
        for cache, changed in zip(caches, there, strict=True):
            cache.copy_(changed)

    def copy_blocks(self, caches: Sequence[Tensor], pairs: Tensor) -> None:
        self._blocks("copy_blocks", caches, pairs, None)

    def gather_blocks(self, caches: Sequence[Tensor], ids: Tensor, staging: Tensor) -> None:
        self._blocks("gather_blocks", caches, ids, staging)

    def scatter_blocks(self, caches: Sequence[Tensor], ids: Tensor, staging: Tensor) -> None:
        self._blocks("scatter_blocks", caches, ids, staging)

    # ---- queries and keys -----------------------------------------------------------------------------------------

    def rotary(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """query, key [num_tokens, heads, dim] in place; cos, sin [num_positions, rotary_dim], sin's first half
        negated."""
        self.launch(
            "rotary", query, key, cos, sin, positions, *query.shape[:2], key.shape[1], query.shape[2], cos.shape[1],
            query.stride(0), key.stride(0), CODES[query.dtype], changes=[query, key],
        )  # fmt: skip

    def qk_norm(
        self, query: Tensor, key: Tensor, weights: tuple[Tensor, Tensor], eps: float, variant: NormVariant,
        tables: tuple[Tensor, Tensor] | None, positions: Tensor,
    ) -> None:  # fmt: skip
        cos, sin = tables or (None, None)
        rotary_dim = 0 if cos is None else cos.shape[1]
        self.launch(
            "qk_norm", query, key, *weights, eps, VARIANTS.index(variant), cos, sin, positions, *query.shape[:2],
            key.shape[1], query.shape[2], rotary_dim, query.stride(0), key.stride(0), CODES[query.dtype],
            changes=[query, key],
        )  # fmt: skip

    def rope_and_cache(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        positions: Tensor,
        tables: tuple[Tensor, Tensor] | None,
        weights: tuple[Tensor, Tensor] | None = None,
        scales: tuple[Tensor, Tensor] | None = None,
        eps: float = 1e-6,
        variant: NormVariant = "llama",
    ) -> None:
        cos, sin = tables or (None, None)
        self.launch(
            "rope_and_cache", query, key, value, *(weights or (None, None)), eps, VARIANTS.index(variant), cos, sin,
            positions, key_cache, value_cache, slot_mapping, *(scales or (None, None)), *query.shape[:2], key.shape[1],
            key_cache.shape[2], query.shape[2], value.shape[2], 0 if cos is None else cos.shape[1], query.stride(0),
            key.stride(0), value.stride(0), key_cache.stride(0), value_cache.stride(0), CODES[query.dtype],
            CODES[key_cache.dtype], changes=[query, key, key_cache, value_cache],
        )  # fmt: skip

    # ---- attention ------------------------------------------------------------------------------------------------

    def paged_attention(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        *,
        scale: float,
        causal: bool = True,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
        key_scale: Tensor | None = None,
        value_scale: Tensor | None = None,
        workspace_bytes: int | None = None,
        max_query_len: int = 0,
        max_seq_len: int | None = None,
        multiprocessors: int = 2,
    ) -> Tensor:
        """workspace_bytes: None for as many as the launcher's companion says. max_query_len, max_seq_len: bounds; 0
        and None for what the shapes say. multiprocessors: how many the grid is made for; few, so that a block has
        several items."""
        if out is None:
            out = torch.full((*query.shape[:2], value_cache.shape[3]), torch.nan, dtype=query.dtype)
        (num_seqs, width), (kv_heads, block_size) = block_tables.shape, key_cache.shape[1:3]
        longest = width * block_size if max_seq_len is None else max_seq_len
        if workspace_bytes is None:
            wanted = (num_seqs, max_query_len or len(query), longest, query.shape[1], kv_heads, value_cache.shape[3])
            workspace_bytes = self.launchers.number("paged_attention_workspace", *wanted)
        workspace = torch.full((workspace_bytes,), 0xFF, dtype=torch.uint8)
        per_head = key_scale is not None and key_scale.numel() > 1
        self.launch(
            "paged_attention", out, query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, sinks,
            key_scale, value_scale, workspace, workspace_bytes, len(query), num_seqs, max_query_len, longest,
            block_tables.stride(0), *query.stride()[:2], *out.stride()[:2], key_cache.stride(0), value_cache.stride(0),
            query.shape[1], kv_heads, block_size, key_cache.shape[3], value_cache.shape[3], window or 0, chunk or 0,
            causal, CODES[query.dtype], CODES[key_cache.dtype], per_head, multiprocessors, float(scale),
            float(softcap or 0), changes=[out],
        )  # fmt: skip
        return out

    # ---- sampling -------------------------------------------------------------------------------------------------

    def sample(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, greedy: Tensor,
        seed_keys: Tensor, positions: Tensor, *, source: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rows = len(logits if source is None else source)
        ids = torch.full((rows,), -2, dtype=torch.int64)
        self.launch(
            "sample", logits, rows, logits.shape[1], logits.stride(0), source, temperature, top_k, top_p, min_p,
            greedy, seed_keys, positions, ids, changes=[ids],
        )  # fmt: skip
        return ids

    def logprobs_of(self, logits: Tensor, ids: Tensor) -> Tensor:
        out = torch.full(ids.shape, torch.nan)
        self.launch("logprobs_of", logits, *logits.shape, logits.stride(0), ids, ids.shape[1], out, changes=[out])
        return out

    def logprobs_topn(
        self, logits: Tensor, ids: Tensor, num_top: int, *, source: Tensor | None = None, ranks: bool = False
    ) -> TopLogprobs:
        rows, count = len(ids), min(num_top, logits.shape[1])
        told = TopLogprobs(
            torch.full(ids.shape, torch.nan), torch.full((rows, count), -2, dtype=torch.int64),
            torch.full((rows, count), 7.0), torch.full((rows if ranks else 0,), -2, dtype=torch.int32),
        )  # fmt: skip
        self.launch(
            "logprobs_topn", logits, rows, logits.shape[1], logits.stride(0), source, ids, ids.shape[1], told.logprobs,
            count, told.top_ids, told.top_logprobs, told.ranks if ranks else None,
            changes=[part for part in told if part.numel()],
        )  # fmt: skip
        return told

    def shape_logits(self, logits: Tensor, scale: float, softcap: float) -> None:
        self.launch("shape_logits", logits, logits.numel(), float(scale), float(softcap), changes=[logits])
