"""The load-time self-check: does this model, over our paged cache, compute what transformers computes?

Two halves. In small: the config shrunk to tiny width with windows of eight tokens, over three windows in chunks of
five and beside another sequence, float32, against transformers' own eager attention and masks, with a negative
control, and once more at the far end of the context, where some models scale by position. On the real weights: a few
tokens, to catch what depends on them, and what the device's kernels do: in small all is done on the CPU. The fused
decoder is checked where its recipe fits, and used only if it passes;
else transformers' modules, swapped, are.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionBackend, AttentionMetadata, HostLengths, PagedLayer
from engine.config import StartError
from engine.models.allow import max_exact_position, one_line
from engine.models.attention_hook import IMPLEMENTATION, select_implementation
from engine.models.backbone import Backbone
from engine.models.build import build_tree
from engine.models.prepare import prepare
from engine.models.shrink import VOCAB_SIZE, WINDOW, draw_weights, shrunk_config
from engine.models.verdict import Verdict

logger = logging.getLogger("pagemill.engine")

BLOCK_SIZE = 16
NUM_TOKENS = 3 * WINDOW + 2
CHUNK = 5
MAX_DIFFERENCE = 1e-5  # of the largest logit, float32
MIN_CONTROL = 1e-2  # a model that sees less must differ at least this much
MAX_FAR_POSITION = 1 << 18  # bounds the rotary tables of the check
REAL_TOKENS = 24
REAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # root mean square, relative


class PagedRun:
    """Feeds sequences to a backbone in pieces over a small cache of its own with shuffled blocks."""

    def __init__(self, backbone: Backbone, num_blocks: int = 16, first_position: int = 0) -> None:
        """first_position: of every sequence's first token, whose cache slots begin at 0 all the same."""
        self._backbone = backbone
        self._device = backbone.device
        self._first_position = first_position
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3))
        self._free: list[int] = order.tolist()
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        for layer in backbone.layers:
            _attach_cache(layer, num_blocks, backbone.dtype, self._device)

    def step(self, pieces: Sequence[tuple[int, list[int]]]) -> list[Tensor]:
        """pieces: (sequence, its next token ids). Returns per piece the logits [num_tokens, vocab], float32, on the
        CPU."""
        first = [self._first_position + self._lengths.get(sequence, 0) for sequence, _ in pieces]
        metadata = self.metadata_for(pieces)
        positions = [start + i for start, (_, tokens) in zip(first, pieces, strict=True) for i in range(len(tokens))]
        ids = self._tensor([token for _, tokens in pieces for token in tokens])
        self._backbone.model.cover(max(positions) + 1)
        every = self._tensor(list(range(len(positions))))
        logits = self._backbone.forward(ids, self._tensor(positions), metadata, every)
        return list(torch.split(logits.cpu(), [len(tokens) for _, tokens in pieces]))

    def _tensor(self, numbers: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(numbers, dtype=dtype, device=self._device)

    def metadata_for(self, pieces: Sequence[tuple[int, list[int]]]) -> AttentionMetadata:
        """Advance the sequences by `pieces` and describe the step, without running it."""
        slots: list[int] = []
        for sequence, tokens in pieces:
            table = self._tables.setdefault(sequence, [])
            start = self._lengths.get(sequence, 0)
            end = start + len(tokens)
            while len(table) * BLOCK_SIZE < end:
                table.append(self._free.pop())
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(start, end)]
            self._lengths[sequence] = end
        tables = [self._tables[sequence] for sequence, _ in pieces]
        width = max(map(len, tables))
        starts = [0]
        for _, tokens in pieces:
            starts.append(starts[-1] + len(tokens))
        seq_lens = [self._lengths[sequence] for sequence, _ in pieces]
        return AttentionMetadata(
            block_tables=self._tensor([table + [-1] * (width - len(table)) for table in tables], torch.int32),
            query_start_loc=self._tensor(starts, torch.int32),
            seq_lens=self._tensor(seq_lens, torch.int32),
            slot_mapping=self._tensor(slots),
            max_query_len=max(len(tokens) for _, tokens in pieces),
            max_seq_len=max(seq_lens),
            host=HostLengths(
                np.array([len(tokens) for _, tokens in pieces], dtype=np.int32), np.array(seq_lens, dtype=np.int32)
            ),
        )

    def close(self) -> None:
        """Give the layers back without a cache."""
        for layer in self._backbone.layers:
            layer.key_cache = layer.value_cache = None


def _attach_cache(layer: PagedLayer, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
    spec = layer.spec
    split = spec.num_kv_heads * BLOCK_SIZE * spec.key_dim
    per_block = split + spec.num_kv_heads * BLOCK_SIZE * spec.value_dim
    blocks = torch.full((num_blocks, per_block), float("nan"), dtype=dtype, device=device)
    layer.key_cache = blocks[:, :split].view(num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.key_dim)
    layer.value_cache = blocks[:, split:].view(num_blocks, spec.num_kv_heads, BLOCK_SIZE, spec.value_dim)


def check_in_small(config: Any, backend: AttentionBackend, *, fuse: bool, stepwise: bool = False) -> Verdict:
    """The first half, on the CPU. fuse: check the fused decoder; raises NoRecipe if this model has none. stepwise: op
    by op, as it computes on other devices.

    Raises StartError if the paged model differs from transformers' or the control does not. Runs on one thread: the
    arrays are so small that waiting for a second one is all it would do."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _check_in_small(config, backend, fuse=fuse, stepwise=stepwise)
    finally:
        torch.set_num_threads(num_threads)


def _check_in_small(config: Any, backend: AttentionBackend, *, fuse: bool, stepwise: bool) -> Verdict:
    tokens = _tokens(NUM_TOKENS)
    tree, expected = _small_model(config, tokens)
    far = _far_position(config)
    expected_far = _plain(tree, tokens, far) if far else expected
    other = _tokens(NUM_TOKENS - 9, seed=12)
    expected_other = _plain(tree, other)
    alone = torch.stack([_plain(tree, [token], position)[0] for position, token in enumerate(tokens)])
    select_implementation(tree, IMPLEMENTATION)
    backbone = prepare(tree, backend, NUM_TOKENS + 1, fuse=fuse, stepwise=stepwise)
    first, second = _in_chunks(backbone, tokens, other)
    differences = [first - expected, second - expected_other]
    if far and all(layer.spec.chunk is None for layer in backbone.layers):  # chunks lie at absolute positions
        run = PagedRun(backbone, first_position=far)
        differences.append(run.step([(0, tokens)])[0] - expected_far)
        run.close()
    scale = float(expected.abs().max())
    difference = max(float(each.abs().max()) for each in differences) / scale
    control = float((alone - expected)[1:].abs().max()) / scale
    if not difference < MAX_DIFFERENCE:
        raise StartError(
            f"Model type {config.model_type!r} computes something else over the paged cache than in transformers "
            f"(difference {difference:.1e} of the largest logit), so it is refused."
        )
    if not control > MIN_CONTROL:
        raise StartError(
            f"The self-check of model type {config.model_type!r} proves nothing: without attention its logits move by "
            f"only {control:.1e}."
        )
    return Verdict(difference, control, backbone.batch_invariant and _keeps_bits(backbone, tokens, first))


def _far_position(config: Any) -> int:
    """Where the last NUM_TOKENS tokens of the context begin; 0 if config.json names no length."""
    if not getattr(config, "max_position_embeddings", None):
        return 0
    return max(0, min(max_exact_position(config), MAX_FAR_POSITION) - NUM_TOKENS)


def _small_model(config: Any, tokens: list[int]) -> tuple[Any, Tensor]:
    """(tree, its plain logits of `tokens`): shrunk in width too if transformers can run it so, else in depth only."""
    error: Exception
    for keep_width in (False, True):
        try:
            tree = build_tree(shrunk_config(config, keep_width=keep_width), torch.float32, "eager")
            draw_weights(tree)
            return tree, _plain(tree, tokens)
        except Exception as failure:  # sizes that do not fit together fail anywhere in modelling code
            error = failure
    raise StartError(f"Model type {config.model_type!r} cannot be checked in small: {one_line(error)}.") from error


def _tokens(count: int, seed: int = 11, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(0, vocab_size, (count,), generator=generator).tolist()
    return ids


@torch.inference_mode()
def _plain(tree: Any, tokens: list[int], first_position: int = 0) -> Tensor:
    """transformers' own logits [num_tokens, vocab], float32."""
    positions = torch.arange(first_position, first_position + len(tokens)).unsqueeze(0)
    output = tree(input_ids=torch.tensor([tokens]), position_ids=positions, use_cache=False)
    logits: Tensor = output.logits[0]
    return logits.float()


def _in_chunks(backbone: Backbone, tokens: list[int], other: list[int]) -> tuple[Tensor, Tensor]:
    """Both sequences in chunks of five, the second one step behind."""
    run = PagedRun(backbone)
    first: list[Tensor] = []
    second: list[Tensor] = []
    for start in range(0, len(tokens) + CHUNK, CHUNK):
        pieces = [(0, tokens[start : start + CHUNK]), (1, other[start - CHUNK : start] if start else [])]
        pieces = [piece for piece in pieces if piece[1]]
        for (sequence, _), logits in zip(pieces, run.step(pieces) if pieces else (), strict=True):
            (second if sequence else first).append(logits)
    run.close()
    return torch.cat(first), torch.cat(second)


def _keeps_bits(backbone: Backbone, tokens: list[int], reference: Tensor) -> bool:
    """True if a sequence's logits are bitwise those of `reference` alone, at once, and beside six others."""
    run = PagedRun(backbone)
    alone = run.step([(0, tokens)])[0]
    others = [(s, _tokens(3 * s, seed=s, vocab_size=min(VOCAB_SIZE, backbone.vocab_size))) for s in range(1, 7)]
    run = PagedRun(backbone, num_blocks=32)
    beside = torch.cat([run.step([(0, tokens[:1]), *others])[0], run.step([(0, tokens[1:])])[0]])
    run.close()
    return bool(torch.equal(alone, reference)) and bool(torch.equal(beside, reference))


def keeps_bits(backbone: Backbone) -> bool:
    """True if on its real weights a few tokens' logits have the same bits at once, in pieces and beside others."""
    tokens = _real_tokens(backbone.vocab_size)
    return _keeps_bits(backbone, tokens, _in_pieces(backbone, tokens))


def _in_pieces(backbone: Backbone, tokens: list[int]) -> Tensor:
    run = PagedRun(backbone)
    logits = torch.cat([run.step([(0, tokens[start : start + 7])])[0] for start in range(0, len(tokens), 7)])
    run.close()
    return logits


def plain_logits(tree: Any) -> Tensor:
    """Before the swap: what transformers computes on the real weights, [REAL_TOKENS, vocab], float32."""
    select_implementation(tree, "eager")
    try:
        return _plain(tree, _real_tokens(tree.config.vocab_size))
    finally:
        select_implementation(tree, IMPLEMENTATION)


def _real_tokens(vocab_size: int) -> list[int]:
    return _tokens(REAL_TOKENS, vocab_size=vocab_size)


def check_real(backbone: Backbone, expected: Tensor) -> None:
    """The second half, after the swap. Raises StartError."""
    got = _in_pieces(backbone, _real_tokens(backbone.vocab_size))
    difference = float((got - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
    tolerance = REAL_TOLERANCE.get(backbone.dtype, 0.1)
    logger.info("Self-check on the real weights: difference %.1e (limit %.1e)", difference, tolerance)
    if not difference < tolerance:
        raise StartError(
            f"On its real weights the model computes something else over the paged cache than in transformers "
            f"(difference {difference:.1e}), so it is refused."
        )
