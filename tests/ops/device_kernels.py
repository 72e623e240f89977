"""The kernels of csrc/cuda behind the signatures of engine.device_ops, over tests/ops/kernels.py."""

from __future__ import annotations

from torch import Tensor

from engine.device_ops import BatchBuffers, CacheScales, HeadNorms, RotaryTables
from tests.ops.kernels import LaunchedOps


class LaunchedDeviceOps:
    """Every method has the meaning of the function of its name in engine.device_ops."""

    def __init__(self, launched: LaunchedOps) -> None:
        self.launched = launched

    # ---- batches --------------------------------------------------------------------------------------------------

    def prepare_batch(
        self, token_ids: Tensor, row_tables: Tensor, block_size: int, rows: Tensor, computed: Tensor, counts: Tensor,
        to: BatchBuffers,
    ) -> None:  # fmt: skip
        self.launched.launch(
            "prepare_batch", token_ids, token_ids.stride(0), row_tables, row_tables.stride(0), block_size, rows,
            computed, counts, len(rows), to.block_tables.shape[1], *to, changes=to,
        )  # fmt: skip

    def advance_batch(
        self, token_ids: Tensor, row_tables: Tensor, block_size: int, rows: Tensor, drawn: Tensor, num_seqs: Tensor,
        to: BatchBuffers,
    ) -> None:  # fmt: skip
        written = (to.input_ids, to.positions, to.slot_mapping, to.seq_lens)
        self.launched.launch(
            "advance_batch", token_ids, token_ids.stride(0), row_tables, row_tables.stride(0), block_size, rows, drawn,
            num_seqs, len(rows), *written, changes=[token_ids, *written],
        )  # fmt: skip

    def store_tokens(self, token_ids: Tensor, rows: Tensor, positions: Tensor, drawn: Tensor) -> None:
        self.launched.launch(
            "store_tokens", token_ids, token_ids.stride(0), rows, positions, drawn, len(rows), changes=[token_ids]
        )

    # ---- edits of logits ------------------------------------------------------------------------------------------

    def load_counts(
        self, counts: Tensor, prompt_bits: Tensor, rows: Tensor, token_ids: Tensor, num_prompt: Tensor,
        num_tokens: Tensor,
    ) -> None:  # fmt: skip
        self.launched.launch(
            "load_counts", counts, prompt_bits, counts.shape[1], rows, token_ids, token_ids.stride(0), num_prompt,
            num_tokens, len(rows), changes=[counts, prompt_bits],
        )  # fmt: skip

    def count_tokens(self, counts: Tensor, rows: Tensor, ids: Tensor) -> None:
        self.launched.launch("count_tokens", counts, counts.shape[1], rows, ids, len(rows), changes=[counts])

    def apply_penalties(
        self, logits: Tensor, rows: Tensor, counts: Tensor, prompt_bits: Tensor, presence: Tensor, frequency: Tensor,
        repetition: Tensor,
    ) -> None:  # fmt: skip
        self.launched.launch(
            "apply_penalties", logits, *logits.shape, logits.stride(0), rows, counts, prompt_bits, presence, frequency,
            repetition, changes=[logits],
        )  # fmt: skip

    def add_bias(self, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
        self.launched.launch("add_bias", logits, logits.stride(0), rows, ids, values, len(rows), changes=[logits])

    def apply_token_bitmask(self, logits: Tensor, masks: Tensor, mask_of: Tensor | None = None) -> None:
        self.launched.launch(
            "apply_token_bitmask", logits, *logits.shape, logits.stride(0), masks, masks.shape[1], mask_of,
            changes=[logits],
        )  # fmt: skip

    # ---- queries, keys and the cache ------------------------------------------------------------------------------

    def rotary(self, query: Tensor, key: Tensor, tables: RotaryTables, positions: Tensor) -> None:
        self.launched.rotary(query, key, *tables, positions)

    def qk_norm(
        self, query: Tensor, key: Tensor, norms: HeadNorms, tables: RotaryTables | None, positions: Tensor
    ) -> None:
        weights = (norms.query_weight, norms.key_weight)
        self.launched.qk_norm(query, key, weights, norms.eps, norms.variant, tables, positions)

    def rope_and_cache(
        self, query: Tensor, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
        positions: Tensor, *, tables: RotaryTables | None = None, norms: HeadNorms | None = None,
        scales: CacheScales | None = None,
    ) -> None:  # fmt: skip
        weights = None if norms is None else (norms.query_weight, norms.key_weight)
        eps, variant = (0.0, "llama") if norms is None else (norms.eps, norms.variant)
        self.launched.rope_and_cache(
            query, key, value, key_cache, value_cache, slot_mapping, positions, tables, weights, scales, eps, variant
        )

    # ---- attention ------------------------------------------------------------------------------------------------

    def paged_attention_workspace(
        self, num_seqs: int, max_query_len: int, max_seq_len: int, num_query_heads: int, num_kv_heads: int,
        value_dim: int,
    ) -> int:  # fmt: skip
        return self.launched.launchers.number(
            "paged_attention_workspace", num_seqs, max_query_len, max_seq_len, num_query_heads, num_kv_heads, value_dim
        )

    def paged_attention_into(
        self, out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor,
        query_start_loc: Tensor, seq_lens: Tensor, workspace: Tensor, *, scale: float, max_query_len: int,
        max_seq_len: int, causal: bool = True, window: int | None = None, chunk: int | None = None,
        softcap: float | None = None, sinks: Tensor | None = None, scales: CacheScales | None = None,
    ) -> None:  # fmt: skip
        key_scale, value_scale = scales or (None, None)
        self.launched.paged_attention(
            query, key_cache, value_cache, block_tables, query_start_loc, seq_lens, scale=scale, causal=causal,
            window=window, chunk=chunk, softcap=softcap, sinks=sinks, out=out, key_scale=key_scale,
            value_scale=value_scale, workspace_bytes=workspace.numel(), max_query_len=max_query_len,
            max_seq_len=max_seq_len,
        )  # fmt: skip
