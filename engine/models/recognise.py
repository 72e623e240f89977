"""What a module computes, found out by running it: on random inputs, against each function we have an op for.

Names and classes say nothing reliable about rounding order (three RMS norms differ only there), so structure
narrows the candidates and arithmetic decides. Answers None for whatever matches nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from engine import ops
from engine.ops import ActivationKind, NormVariant

NORM_VARIANTS: tuple[NormVariant, ...] = ("llama", "gemma", "f32", "layer")
ACTIVATIONS: dict[ActivationKind, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
# What a module raises that wants other arguments than one tensor: it is not what we are looking for.
NO_MATCH = (TypeError, ValueError, IndexError, RuntimeError, AttributeError)
MAX_DIFFERING = 0.05  # share of elements that may differ by rounding between equal bfloat16 functions


def random_numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(20)
    return torch.randn(*shape, generator=generator).to(dtype)


def _testable(dtype: torch.dtype) -> torch.dtype:
    """One that our ops know on the CPU, where models are looked at, and that rounds as visibly."""
    return torch.bfloat16 if dtype == torch.float16 else dtype


def is_close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    scale = float(theirs.float().abs().max()) or 1.0
    return float((ours.float() - theirs.float()).abs().max()) <= tolerance * scale


@dataclass(frozen=True, slots=True)
class LinearParts:
    """weight: [out_features, in_features], in whatever memory order it came."""

    weight: Tensor
    bias: Tensor | None


def linear_parts(module: nn.Module) -> LinearParts | None:
    """Weight and bias of a plain linear layer. Subclasses may do more, so only the exact classes count."""
    if type(module) is nn.Linear:
        return LinearParts(module.weight, module.bias)
    if type(module) is Conv1D:
        weight, bias = cast(Tensor, module.weight), cast(Tensor, module.bias)
        return LinearParts(weight.t(), bias)
    return None


def norm_eps(module: nn.Module) -> float | None:
    """The epsilon of something shaped like a norm: one 1-D weight, perhaps a bias, nothing else but scalars."""
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    if weight is None or weight.dim() != 1 or not parameters.keys() <= {"weight", "bias"}:
        return None
    if any(parameter.shape != weight.shape for parameter in parameters.values()):
        return None
    if any(True for _ in module.children()) or any(True for _ in module.buffers()):
        return None
    for name in ("eps", "variance_epsilon", "epsilon"):
        value = getattr(module, name, None)
        if isinstance(value, float) and 0.0 < value < 0.1:
            return value
    return None


def norm_variant(module: nn.Module, eps: float) -> NormVariant | None:
    """Which variant of ops.rms_norm the module is, in float32 and in its own dtype."""
    own = cast(Tensor, module.weight)
    dtype = _testable(own.dtype)
    x, drawn = 3 * random_numbers(8, own.numel()), random_numbers(2, own.numel())
    parameters = {"weight": 1 + 0.5 * drawn[0]}
    if isinstance(module._parameters.get("bias"), Tensor):
        parameters["bias"] = drawn[1]
    variants = ("layer",) if "bias" in parameters else NORM_VARIANTS
    expected = functional_call(module, parameters, (x,))
    fits = [v for v in variants if is_close(ops.rms_norm(x, norm_tensor(parameters, v), eps, v), expected, 1e-5)]
    if dtype == torch.float32 or not fits:
        return fits[0] if fits else None
    parameters, x = {name: drawn.to(dtype) for name, drawn in parameters.items()}, x.to(dtype)
    expected = functional_call(module, parameters, (x,))
    ours = {v: ops.rms_norm(x, norm_tensor(parameters, v), eps, v) for v in fits}
    differing = {v: float((ours[v] != expected).float().mean()) for v in fits}
    best = min(differing, key=lambda v: differing[v])
    return best if differing[best] <= MAX_DIFFERING else None


def norm_tensor(parameters: Mapping[str, Tensor], variant: NormVariant) -> Tensor:
    """What ops.rms_norm wants as its weight, of a norm's "weight" and "bias"."""
    weight, bias = parameters["weight"], parameters.get("bias")
    if variant != "layer":
        return weight
    return torch.stack([weight, torch.zeros_like(weight) if bias is None else bias])


def activation_kind(module: nn.Module, dtype: torch.dtype) -> ActivationKind | None:
    """Which kind of ops.activation a leaf module without parameters is."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        return None
    x, dtype = torch.linspace(-9, 9, 512), _testable(dtype)
    try:
        expected = module(x)
        expected_own = module(x.to(dtype))
    except NO_MATCH:
        return None
    if not isinstance(expected, Tensor) or not isinstance(expected_own, Tensor):
        return None
    for kind in ACTIVATIONS:
        same = is_close(ops.activation(x, kind), expected, 1e-6)
        if same and is_close(ops.activation(x.to(dtype), kind), expected_own, 1e-6 if dtype == x.dtype else 1e-2):
            return kind
    return None


@dataclass(frozen=True, slots=True)
class GatedReading:
    """How to read a class of MLPs: which of the candidates of `gated_candidates` it is, and its activation."""

    candidate: int
    kind: ActivationKind


def gated_candidates(module: nn.Module) -> list[tuple[LinearParts, LinearParts, LinearParts]]:
    """Every reading as (gate, up, down) that structure allows: linear layers of matching shapes and at most an
    activation beside them; [] for anything else."""
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers()):
        return []
    linears = []
    for child in module.children():
        parts = linear_parts(child)
        if parts is not None:
            linears.append(parts)
        elif any(True for _ in child.parameters()):
            return []
    return _shape_candidates(linears)


def gated_reading(
    module: nn.Module, candidates: list[tuple[LinearParts, LinearParts, LinearParts]]
) -> GatedReading | None:
    """The candidate and activation whose arithmetic is the module's; None if none is."""
    weight = candidates[0][0].weight
    x = random_numbers(4, weight.shape[1], dtype=weight.dtype)
    try:
        expected = module(x)
    except NO_MATCH:
        return None
    if not isinstance(expected, Tensor):
        return None
    tolerance = 1e-5 if x.dtype == torch.float32 else 3e-2
    for index, (gate, up, down) in enumerate(candidates):
        gated, linear = functional.linear(x, gate.weight, gate.bias), functional.linear(x, up.weight, up.bias)
        for kind, activate in ACTIVATIONS.items():
            if is_close(functional.linear(activate(gated) * linear, down.weight, down.bias), expected, tolerance):
                return GatedReading(index, kind)
    return None


def ungated_kind(module: nn.Module, up: LinearParts, down: LinearParts) -> ActivationKind | None:
    """The activation if the module computes down(activation(up(x))); else None."""
    x = random_numbers(4, up.weight.shape[1], dtype=up.weight.dtype)
    try:
        expected = module(x)
    except NO_MATCH:
        return None
    if not isinstance(expected, Tensor):
        return None
    tolerance = 1e-5 if x.dtype == torch.float32 else 3e-2
    inner = functional.linear(x, up.weight, up.bias)
    for kind, activate in ACTIVATIONS.items():
        if is_close(functional.linear(activate(inner), down.weight, down.bias), expected, tolerance):
            return kind
    return None


def _shape_candidates(linears: list[LinearParts]) -> list[tuple[LinearParts, LinearParts, LinearParts]]:
    if len(linears) == 3:
        return [
            (linears[a], linears[b], linears[c])
            for a, b, c in ((0, 1, 2), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0), (2, 1, 0))
            if linears[a].weight.shape == linears[b].weight.shape == linears[c].weight.shape[::-1]
        ]
    if len(linears) == 2:
        for wide, down in (linears, linears[::-1]):
            out_features, in_features = down.weight.shape
            if wide.weight.shape == (2 * in_features, out_features):
                first, second = _halves(wide)
                return [(first, second, down), (second, first, down)]
    return []


def _halves(wide: LinearParts) -> tuple[LinearParts, LinearParts]:
    half = wide.weight.shape[0] // 2
    bias = wide.bias
    return (
        LinearParts(wide.weight[:half], None if bias is None else bias[:half]),
        LinearParts(wide.weight[half:], None if bias is None else bias[half:]),
    )
