"""The swap pass: a transformers tree in, the same tree with our ops in the place of torch's.

Goes by structure and arithmetic (`recognise`), never by a model's name. What it does not recognise it leaves
alone and reports, and then the tree makes no claim of batch invariance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from engine.device import HOST
from engine.models.recognise import (
    GatedReading,
    LinearParts,
    activation_kind,
    gated_candidates,
    gated_reading,
    linear_parts,
    norm_eps,
    norm_tensor,
    norm_variant,
)
from engine.models.rope_table import RopeTable, make_table
from engine.models.swap_modules import FusedActivation, FusedRMSNorm, GatedMLP, PackedLinear
from engine.ops import ActivationKind, NormVariant

# Compute nothing, or only gather rows and scale them, which is exact element by element.
INVARIANT = (nn.Embedding, nn.Dropout, nn.Identity, PackedLinear, FusedRMSNorm, FusedActivation, GatedMLP, RopeTable)
NormDecision = Callable[[nn.Module, float], NormVariant | None]


@dataclass(slots=True)
class SwapReport:
    """What the pass did. left: "path (class)" of modules that still compute with torch's own operations."""

    mlps: int = 0
    linears: int = 0
    norms: int = 0
    activations: int = 0
    rope_tables: int = 0
    left: list[str] = field(default_factory=list)

    @property
    def batch_invariant(self) -> bool:
        return not self.left


def swap_modules(
    tree: Any, dtype: torch.dtype, max_positions: int, device: torch.device = HOST, *, join: bool = True
) -> SwapReport:
    """Swap in place. dtype: of the weights; max_positions: of the rotary tables, in tokens. device: of the weights
    afterwards; before, the tree is on the CPU, and one weight after the other leaves it.

    join: gates and what they let through become one layer, else every layer stays under its name.
    Original weights are released one by one; a tied LM head gets a packed copy beside the embedding table."""
    report = SwapReport()
    with torch.inference_mode():
        _swap_ropes(tree, dtype, max_positions, report)
        if join:
            _swap_mlps(tree, report, device)
        _swap_linears(tree, report, device)
        _swap_norms(tree, report)
        _swap_activations(tree, dtype, report)
        if device != HOST:
            _move_rest(tree, device)
    report.left = [f"{name} ({type(module).__name__})" for name, module in _computing(tree)]
    return report


def _places(tree: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, attribute, child) for every place in the tree, a shared child at each of its places."""
    return [(parent, name, child) for parent in tree.modules() for name, child in parent.named_children()]


def _swap_ropes(tree: nn.Module, dtype: torch.dtype, max_positions: int, report: SwapReport) -> None:
    for parent, name, child in _places(tree):
        table = make_table(child, dtype, max_positions)
        if table is not None:
            setattr(parent, name, table)
            report.rope_tables += 1


def _move_rest(tree: nn.Module, device: torch.device) -> None:
    """What is not packed: norms, embeddings, tables, and modules that are left as they were."""
    tree.to(device)
    for module in tree.modules():
        if isinstance(module, RopeTable):
            module.move_to(device)


def _swap_mlps(tree: nn.Module, report: SwapReport, device: torch.device) -> None:
    """The arithmetic of one MLP speaks for all of its class and shape."""
    readings: dict[tuple[type, torch.Size], GatedReading | None] = {}
    for parent, name, child in _places(tree):
        candidates = gated_candidates(child)
        if not candidates:
            continue
        key = (type(child), candidates[0][0].weight.shape)
        if key not in readings:
            readings[key] = gated_reading(child, candidates)
        reading = readings[key]
        if reading is not None:
            setattr(parent, name, _gated_mlp(candidates[reading.candidate], reading.kind, device))
            report.mlps += 1


def _gated_mlp(
    parts: tuple[LinearParts, LinearParts, LinearParts], kind: ActivationKind, device: torch.device
) -> GatedMLP:
    gate, up, down = parts
    bias = None if gate.bias is None or up.bias is None else torch.cat([gate.bias, up.bias])
    gate_up = LinearParts(torch.cat([gate.weight, up.weight]), bias)
    return GatedMLP(_packed(gate_up, device), _packed(down, device), kind)


def _packed(parts: LinearParts, device: torch.device, out_dtype: torch.dtype | None = None) -> PackedLinear:
    bias: Tensor | None = None if parts.bias is None else parts.bias.detach().to(device)
    return PackedLinear(parts.weight.detach().contiguous().to(device), bias, out_dtype)


def _swap_linears(tree: Any, report: SwapReport, device: torch.device) -> None:
    head = tree.get_output_embeddings()
    for parent, name, child in _places(tree):
        parts = linear_parts(child)
        if parts is not None:
            setattr(parent, name, _packed(parts, device, torch.float32 if child is head else None))
            report.linears += 1


def _swap_norms(tree: nn.Module, report: SwapReport) -> None:
    variant_of = _remembering(norm_variant)
    for parent, name, child in _places(tree):
        eps = norm_eps(child)
        variant = None if eps is None else variant_of(child, eps)
        if eps is not None and variant is not None:
            weight = norm_tensor(dict(child.named_parameters()), variant)
            setattr(parent, name, FusedRMSNorm(weight, eps, variant))
            report.norms += 1


def _remembering(
    decide: Callable[[nn.Module, float], NormVariant | None],
) -> Callable[[nn.Module, float], NormVariant | None]:
    """One decision per class, width and epsilon: the layers of a model repeat them."""
    known: dict[tuple[type, int, float], NormVariant | None] = {}

    def decision(module: nn.Module, eps: float) -> NormVariant | None:
        weight: Any = module.weight
        key = (type(module), weight.numel(), eps)
        if key not in known:
            known[key] = decide(module, eps)
        return known[key]

    return decision


def _swap_activations(tree: nn.Module, dtype: torch.dtype, report: SwapReport) -> None:
    for parent, name, child in _places(tree):
        if isinstance(child, (*INVARIANT, nn.ModuleList)):
            continue
        kind = activation_kind(child, dtype)
        if kind is not None:
            setattr(parent, name, FusedActivation(kind))
            report.activations += 1


def _computing(tree: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold parameters of their own or are leaves, and that no op of ours serves."""
    for name, module in tree.named_modules():
        if isinstance(module, (*INVARIANT, nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        is_leaf = not any(True for _ in module.children())
        if is_leaf or any(True for _ in module.parameters(recurse=False)):
            yield name, module
