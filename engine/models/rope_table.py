"""Rotary cos and sin as table rows instead of trigonometry per step.

The table is filled by the model's own module, so every rope type that depends on the position alone is served
exactly. It also keeps batch invariance: torch's vectorised cos and sin treat the tail of an array by another
routine, so a position's bits would depend on where in the batch it stands. Here each position is computed
once, in pieces of fixed size.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.device import HOST

PIECE = 64  # positions computed at once: at most 32,768 elements, which torch does not split over threads
INITIAL_POSITIONS = 2048


class RopeTable(nn.Module):
    """Stands in for a rotary embedding module: forward(x, position_ids[, layer_type]) -> (cos, sin).

    source: the module replaced, on the CPU; it fills the tables. limit: positions, in tokens. device: of the tables;
    their bits are the same on every one."""

    def __init__(
        self,
        source: nn.Module,
        layer_types: tuple[str, ...],
        dtype: torch.dtype,
        limit: int,
        device: torch.device = HOST,
    ) -> None:
        super().__init__()
        self._source = (source,)  # in a tuple: not a submodule, so a walk over the tree does not meet it
        self._keys: tuple[str | None, ...] = layer_types or (None,)
        self._dtype = dtype
        self._limit = limit
        self._device = device
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self._num_positions = 0
        self.cover(min(INITIAL_POSITIONS, limit))

    def cover(self, num_positions: int) -> None:
        """Make positions [0, num_positions) available; the table doubles, rows once computed never change."""
        if num_positions <= self._num_positions:
            return
        wanted = max(num_positions, min(self._limit, 2 * self._num_positions))
        wanted = -(-wanted // PIECE) * PIECE
        for key in self._keys:
            pieces = [self._compute(key, start) for start in range(self._num_positions, wanted, PIECE)]
            rows = [torch.cat(part).to(self._device) for part in zip(*pieces, strict=True)]
            known = [(table,) for table in self._tables[key]] if key in self._tables else [(), ()]
            cos, sin = (torch.cat([*old, new]) if old else new for old, new in zip(known, rows, strict=True))
            self._tables[key] = (cos, sin)
        self._num_positions = wanted

    def move_to(self, device: torch.device) -> None:
        """Tables made so far, and those to come."""
        self._device = device
        self._tables = {key: (cos.to(device), sin.to(device)) for key, (cos, sin) in self._tables.items()}

    def rows(self) -> tuple[Tensor, Tensor]:
        """All of cos and sin, [num_positions, rotary_dim]; only of a table without layer types."""
        return self._tables[None]

    @torch.no_grad()
    def _compute(self, key: str | None, start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + PIECE).unsqueeze(0)
        like = torch.empty(1, 1, 1, dtype=self._dtype)
        options: dict[str, Any] = {} if key is None else {"layer_type": key}
        cos, sin = self._source[0](like, positions, **options)
        return cos[0].contiguous(), sin[0].contiguous()

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = self._tables[layer_type]  # [num_positions, rotary_dim], in the dtype the source answers in
        return functional.embedding(position_ids, cos), functional.embedding(position_ids, sin)


def make_table(source: nn.Module, dtype: torch.dtype, limit: int) -> RopeTable | None:
    """A table in the place of `source`; None if that is no rotary module or does not answer (cos, sin) per position.

    Recognised by structure (frequency buffers and a rope_type, nothing trained), then compared with the source."""
    layer_types = _layer_types(source)
    if layer_types is None or not _answers_cos_sin(source, layer_types, dtype):
        return None
    table = RopeTable(source, layer_types, dtype, limit)
    return table if _matches(table, source, layer_types, dtype, limit) else None


def _layer_types(module: nn.Module) -> tuple[str, ...] | None:
    names = [name for name, _ in module.named_buffers(recurse=False)]
    if not any(name.endswith("inv_freq") for name in names) or any(True for _ in module.parameters()):
        return None
    rope_type = getattr(module, "rope_type", None)
    if isinstance(rope_type, str):
        return ()
    return tuple(cast("dict[str, str]", rope_type)) if isinstance(rope_type, dict) else None


def _answer(source: nn.Module, positions: list[int], key: str | None, dtype: torch.dtype) -> Any:
    options = {} if key is None else {"layer_type": key}
    return source(torch.empty(1, 1, 1, dtype=dtype), torch.tensor([positions]), **options)


def _answers_cos_sin(source: nn.Module, layer_types: tuple[str, ...], dtype: torch.dtype) -> bool:
    answer = _answer(source, [0, 1], layer_types[0] if layer_types else None, dtype)
    return (
        isinstance(answer, tuple)
        and len(answer) == 2
        and all(isinstance(part, Tensor) and part.is_floating_point() and part.shape[:2] == (1, 2) for part in answer)
    )


def _matches(
    table: RopeTable, source: nn.Module, layer_types: tuple[str, ...], dtype: torch.dtype, limit: int
) -> bool:
    positions = [position for position in (0, 1, 7, 200, 511, 1023) if position < limit]
    for key in layer_types or (None,):
        ours, theirs = _answer(table, positions, key, dtype), _answer(source, positions, key, dtype)
        for mine, other in zip(ours, theirs, strict=True):
            if mine.shape != other.shape or mine.dtype != other.dtype:
                return False
            if float((mine.float() - other.float()).abs().max()) > (1e-5 if mine.dtype == torch.float32 else 1e-2):
                return False
    return True
