"""Which precision each linear layer's weight is served in: `--quantization`, asked weight by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from engine.config import Quantization
from engine.models.quantised import Bits, QuantisedWeight, quantise


class Stored(Protocol):
    """A model's files, as far as they hold quantised weights."""

    def quantised(self, name: str) -> QuantisedWeight | None:
        """A matrix in the smallest form that holds what is stored; None if that is floating point."""
        ...


class Quantiser:
    """auto: what the file has. int8, int4: every weight in so many bits; what is stored with as many or fewer loses
    nothing. The head, whose rounding every token sees, has 8 bits unless the file has it in 4."""

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
        bits: Bits = 8 if self._choice == "int8" or is_head else 4
        if stored is None or stored.bits > bits:
            return quantise(self._tensors[name].detach(), bits)
        return stored.widened(bits) if self._choice == "int8" else stored
