"""Which precision each linear layer's weight is served in: `--quantization`, asked weight by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.config import Quantization
from engine.models.quantised import Bits, QuantFormat, QuantisedWeight, join_formats, quantise


class Stored(Protocol):
    """A model's files, as far as they hold quantised weights."""

    def quantised(self, name: str) -> QuantisedWeight | None:
        """A matrix in the smallest form that holds what is stored; None if that is floating point."""
        ...

    def quantised_format(self, name: str) -> QuantFormat | None:
        """That of `quantised(name)`, without reading it."""
        ...


class Quantiser:
    """auto: what the file has. int8, int4: every weight in so many bits; what is stored with as many or fewer loses
    nothing. Head and embedding, whose rounding every token sees, have 8 bits unless the file has them in 4."""

    def __init__(self, choice: Quantization, stored: Stored, tensors: Mapping[str, Tensor]) -> None:
        """tensors: by parameter name, for weights that are to be rounded."""
        self._choice, self._stored, self._tensors = choice, stored, tensors

    def weight(self, name: str, *, is_head: bool = False) -> QuantisedWeight | None:
        """The matrix `name`, or None if it stays in floating point. Raises StartError."""
        if self._choice == "none":
            return None
        stored = self._stored.quantised(name)
        if self._choice == "auto":
            return stored
        bits = self._bits(is_head=is_head)
        if stored is None or stored.bits > bits:
            return quantise(self._tensors[name].detach(), bits)
        return stored.widened(bits) if self._choice == "int8" else stored

    def format(self, name: str, *, is_head: bool = False) -> QuantFormat | None:
        """That of `weight(name)`, without reading it."""
        if self._choice == "none":
            return None
        stored = self._stored.quantised_format(name)
        if self._choice == "auto":
            return stored
        bits = self._bits(is_head=is_head)
        if stored is None or stored.bits > bits:
            return QuantFormat(bits, has_minimums=bits == 4)
        return join_formats([stored, QuantFormat(8, False)]) if self._choice == "int8" else stored

    def _bits(self, *, is_head: bool) -> Bits:
        return 8 if self._choice == "int8" or is_head else 4
