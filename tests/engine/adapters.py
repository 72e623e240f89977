"""Adapters in peft's format with random weights, what they mean by definition, and runs over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from engine.config import Adapter
from engine.models.backbone import Backbone
from engine.models.deltas import AdapterSpan
from engine.models.lora import LayerShape
from engine.models.self_check import PagedRun

PREFIX = "base_model.model."


def shapes_of(backbone: Backbone) -> dict[str, LayerShape]:
    """Of all layers that adapters may change."""
    return {
        path: LayerShape(rows, site.in_features)
        for site in backbone.model.adapter_sites()
        for path, rows in zip(site.paths, site.rows, strict=True)
    }


def shapes_in(tree: nn.Module) -> dict[str, LayerShape]:
    """Of a transformers model's linear layers."""
    shapes = {}
    for name, module in tree.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            shapes[name] = LayerShape(module.out_features, module.in_features)
        elif isinstance(module, Conv1D):
            shapes[name] = LayerShape(module.nf, module.nx)
    return shapes


def write_adapter(
    folder: Path,
    shapes: Mapping[str, LayerShape],
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    tensors: Mapping[str, Tensor] | None = None,
    ranks: Mapping[str, int] | None = None,
    **config: Any,
) -> Adapter:
    """For every layer of `shapes`. tensors: beside those drawn; ranks: of layers with another one."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {}
    for path, shape in shapes.items():
        own = (ranks or {}).get(path, rank)
        a = torch.randn(own, shape.in_features, generator=generator) / shape.in_features**0.5
        b = torch.randn(shape.out_features, own, generator=generator) * 0.4 / alpha**0.5
        drawn[f"{PREFIX}{path}.lora_A.weight"] = a.to(dtype)
        drawn[f"{PREFIX}{path}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**drawn, **(tensors or {})}, folder / "adapter_model.safetensors")
    targets = sorted({path.rpartition(".")[2] for path in shapes})
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return Adapter(folder.name, str(folder))


def added(adapter: Adapter, scales: Mapping[str, float] | None = None) -> dict[str, Tensor]:
    """scale * B A of every layer by the definition, [out_features, in_features], float64. scales: where a layer's is
    not lora_alpha / r."""
    config = json.loads((Path(adapter.path) / "adapter_config.json").read_text())
    tensors = load_file(Path(adapter.path) / "adapter_model.safetensors")
    found = {}
    for name, b in tensors.items():
        if name.endswith(".lora_B.weight"):
            path = name.removeprefix(PREFIX).removesuffix(".lora_B.weight")
            a = tensors[name.replace("lora_B", "lora_A")]
            scale = (scales or {}).get(path, config["lora_alpha"] / config["r"])
            found[path] = scale * (b.double() @ a.double())
    return found


@torch.no_grad()
def merge(tree: nn.Module, adapter: Adapter, scales: Mapping[str, float] | None = None) -> None:
    """Into the weights of a transformers model."""
    for path, delta in added(adapter, scales).items():
        module = tree.get_submodule(path)
        weight = module.weight
        assert isinstance(weight, Tensor)
        turned = delta if isinstance(module, nn.Linear) else delta.t()
        weight.copy_((weight.double() + turned).to(weight.dtype))


class AdaptedRun(PagedRun):
    """A PagedRun whose sequences each have an adapter, 0 for none."""

    def __init__(self, backbone: Backbone, adapters: Mapping[int, int], num_blocks: int = 64) -> None:
        super().__init__(backbone, num_blocks)
        self._adapters = adapters
        self._forward = backbone.forward

    def step(self, pieces: Sequence[tuple[int, list[int]]]) -> list[Tensor]:
        """As PagedRun.step, whatever the order of the pieces."""
        of = [self._adapters[sequence] for sequence, _ in pieces]
        order = sorted(range(len(pieces)), key=of.__getitem__)
        spans: list[AdapterSpan] = []
        place = 0
        for index in order:
            stop = place + len(pieces[index][1])
            if spans and spans[-1].adapter == of[index]:
                spans[-1] = spans[-1]._replace(stop=stop)
            elif of[index]:
                spans.append(AdapterSpan(of[index], place, stop))
            place = stop
        backbone = self._backbone
        plain = backbone.forward
        backbone.forward = lambda *args: plain(*args, tuple(spans))  # type: ignore[method-assign]  # for one step
        try:
            logits = super().step([pieces[index] for index in order])
        finally:
            backbone.forward = plain  # type: ignore[method-assign]
        return [logits[order.index(index)] for index in range(len(pieces))]
