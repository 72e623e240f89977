"""The modules that take the place of torch's and transformers' own: the same function through our compiled ops.

Each keeps the shape contract of what it replaces ([..., features] in and out). Their ops accumulate one row in an
order that depends on that row alone, which is what makes a whole tree batch-invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine import ops
from engine.ops import ActivationKind, NormVariant


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed for the CPU. The original weight is not kept.

    out_dtype: of the result; None: that of x."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype | None = None) -> None:
        """weight: [out_features, in_features]; bias: [out_features]."""
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._out_dtype = weight.dtype if out_dtype is None else out_dtype
        self.register_buffer("packed", ops.pack_linear(weight), persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        y = ops.linear(rows, self.packed, self.bias, self.out_features, out_dtype=self._out_dtype)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class FusedRMSNorm(nn.Module):
    """RMS or layer norm over the last dimension. variant: which of ops.rms_norm's the original was."""

    weight: Tensor

    def __init__(self, weight: Tensor, eps: float, variant: NormVariant) -> None:
        super().__init__()
        self.register_buffer("weight", weight.detach(), persistent=False)
        self.eps = eps
        self.variant = variant

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return ops.rms_norm(rows, self.weight, self.eps, self.variant).view(x.shape)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}, variant={self.variant}"


class FusedActivation(nn.Module):
    """An element-wise activation whose bits do not depend on where in the array an element stands."""

    def __init__(self, kind: ActivationKind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return ops.activation(x.contiguous(), self.kind)

    def extra_repr(self) -> str:
        return self.kind


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)) with gate and up in one product."""

    def __init__(self, gate_up: PackedLinear, down: PackedLinear, kind: ActivationKind) -> None:
        """gate_up: gate's rows first, then up's. kind: a key of ops.ACTIVATE_AND_MULTIPLY."""
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.kind = kind
        self._activate = ops.ACTIVATE_AND_MULTIPLY[kind]

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y: Tensor = self.down(self._activate(self.gate_up(rows)))
        return y.view(*x.shape[:-1], self.down.out_features)
