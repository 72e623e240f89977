"""LoRA adapters from peft's folders into a loaded model. Imported only where there are any.

A folder is taken for hostile: no pickles, sizes and shapes are checked against the model before a tensor is read, and
numbers that are not finite are refused. Whatever the model would not compute as peft does is one sentence.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from engine.config import Adapter
from engine.memory import available_memory, size_text
from engine.models.backbone import Backbone
from engine.models.deltas import PANEL, LowRank, joined
from engine.models.lora_config import CONFIG_FILE, LoraRules, Refusal, read_rules
from engine.models.safetensors_files import Shard, open_shard

logger = logging.getLogger("pagemill.engine")

WEIGHTS_FILE = "adapter_model.safetensors"
MAX_HEADER = 16 << 20  # bytes; 60,000 layers' names need no more
PICKLE_FILE = "adapter_model.bin"
_TENSOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Of a linear layer that an adapter may change. joined: out_features of all layers of its product; 0: it is
    alone."""

    out_features: int
    in_features: int
    joined: int = 0

    def num_bytes(self, rank: int, dtype: torch.dtype) -> int:
        """Of an adapter's part as it is served, ranks being filled up to whole panels: at most."""
        return -(-rank // PANEL) * PANEL * (self.in_features + (self.joined or self.out_features)) * dtype.itemsize


def add_adapters(backbone: Backbone, adapters: Sequence[Adapter]) -> None:
    """From now on spans of the backbone's forwards may name them, by their places from 1. Raises StartError."""
    model = backbone.model
    sites = model.adapter_sites()
    shapes = {
        path: LayerShape(rows, site.in_features, sum(site.rows))
        for site in sites
        for path, rows in zip(site.paths, site.rows, strict=True)
    }
    for place, adapter in enumerate(adapters, 1):
        parts = read_adapter(adapter, shapes, backbone.dtype)
        num_layers, before = len(parts), model.weight_bytes
        for site in sites:
            own = [parts.pop(path, None) for path in site.paths]  # what is packed need not be kept
            if any(part is not None for part in own):
                site.adapt(place, joined(site, own))
        logger.info(
            "Adapter %s changes %d linear layers and takes %s",
            adapter.name, num_layers, size_text(model.weight_bytes - before),
        )  # fmt: skip
        del own
    model.finish_adapters(len(adapters))
    backbone.num_adapters = len(adapters)


def read_adapter(adapter: Adapter, shapes: Mapping[str, LayerShape], dtype: torch.dtype) -> dict[str, LowRank]:
    """What the adapter adds, in `dtype`, by the names of the layers that it changes. shapes: of those it may change.
    Raises StartError."""
    folder = _folder(adapter)
    rules = read_rules(adapter, folder)
    shard = open_shard(folder / WEIGHTS_FILE, MAX_HEADER)
    names = _names(adapter, shard, shapes)
    _check_layers(adapter, rules, names, shapes)
    _check_room(adapter, rules, names, shapes, dtype)
    read = shard.reader()
    found = {}
    for path, (stored, name_a, name_b) in names.items():
        rank, shape = rules.rank_of(stored), shapes[path]
        _check_shape(adapter, shard, name_a, (rank, shape.in_features))
        _check_shape(adapter, shard, name_b, (shape.out_features, rank))
        a = _numbers(adapter, name_a, read(name_a), 1.0, dtype)
        b = _numbers(adapter, name_b, read(name_b), rules.scale_of(stored), dtype)
        found[path] = LowRank(a, b)
    return found


def _folder(adapter: Adapter) -> Path:
    try:
        folder = Path(adapter.path).expanduser()
        is_folder, has_weights = folder.is_dir(), (folder / WEIGHTS_FILE).is_file()
        has_pickle = (folder / PICKLE_FILE).is_file()
    except (OSError, RuntimeError, ValueError) as error:  # no permission, an unknown ~user, a zero byte
        raise Refusal(adapter, f"it cannot be looked for ({type(error).__name__})") from error
    if not is_folder:
        raise Refusal(adapter, f"there is no such folder (wanted: one with {CONFIG_FILE} and {WEIGHTS_FILE})")
    if not has_weights and has_pickle:
        raise Refusal(adapter, f"{PICKLE_FILE} is pickled, which may run code when loaded; save it as safetensors")
    if not has_weights:
        raise Refusal(adapter, f"there is no {WEIGHTS_FILE}")
    return folder


def _names(adapter: Adapter, shard: Shard, shapes: Mapping[str, LayerShape]) -> dict[str, tuple[str, str, str]]:
    """By the model's name of a layer: the file's name for it, and those of its A and B."""
    halves: dict[str, dict[str, str]] = {}
    for name in shard.shapes:
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise Refusal(adapter, f"its tensor {name[:120]} is no lora_A.weight or lora_B.weight of a linear layer")
        if found[2] in halves.setdefault(found[1], {}):
            raise Refusal(adapter, f"it has the tensor {name[:120]} twice")
        halves[found[1]][found[2]] = name
    names: dict[str, tuple[str, str, str]] = {}
    for stored, pair in halves.items():
        path = next((each for each in _readings(stored) if each in shapes), None)
        if path is None:
            raise Refusal(
                adapter, f"it changes {stored[:120]}, which is no linear layer of this model that adapters may change"
            )
        if pair.keys() != {"A", "B"} or path in names:
            raise Refusal(adapter, f"it has not just one lora_A and one lora_B for {path}")
        names[path] = (stored, pair["A"], pair["B"])
    if not names:
        raise Refusal(adapter, f"{WEIGHTS_FILE} holds no tensors")
    return names


def _readings(stored: str) -> Iterator[str]:
    """A layer's name in the adapter, then what it is called if the adapter was made in another frame of the same
    model: a multimodal one, or one without a head."""
    yield stored
    for prefix, replacement in (
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("language_model.", ""),
        ("", "model."),
        ("", "transformer."),
    ):
        if stored.startswith(prefix):
            yield replacement + stored.removeprefix(prefix)


def _check_layers(
    adapter: Adapter,
    rules: LoraRules,
    names: Mapping[str, tuple[str, str, str]],
    shapes: Mapping[str, LayerShape],
) -> None:
    """Tensors and rules must speak of the same layers; peft lets targets name some that no model has."""
    for stored, _, _ in names.values():
        if not rules.allow(stored):
            raise Refusal(adapter, f"it has tensors for {stored}, which target_modules or layers_to_transform exclude")
    if not rules.may_lack:
        lacking = next((path for path in shapes if path not in names and rules.names(path)), None)
        if lacking is not None:
            raise Refusal(adapter, f"it lacks the tensors for {lacking}")


def _check_room(
    adapter: Adapter,
    rules: LoraRules,
    names: Mapping[str, tuple[str, str, str]],
    shapes: Mapping[str, LayerShape],
    dtype: torch.dtype,
) -> None:
    wanted = 0
    for path, (stored, _, _) in names.items():
        rank, shape = rules.rank_of(stored), shapes[path]
        read = rank * (shape.in_features + shape.out_features) * dtype.itemsize
        wanted += read + shape.num_bytes(rank, dtype)  # both are there while it is packed
    available = available_memory()
    if wanted > available:
        raise Refusal(adapter, f"it takes {size_text(wanted)}, but only {size_text(available)} of memory is available")


def _check_shape(adapter: Adapter, shard: Shard, name: str, wanted: tuple[int, int]) -> None:
    if shard.shapes[name] != wanted:
        raise Refusal(
            adapter,
            f"the tensor {name[:120]} has the shape {list(shard.shapes[name])[:4]}, but this model and {CONFIG_FILE} "
            f"imply {list(wanted)}",
        )


def _numbers(adapter: Adapter, name: str, tensor: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if tensor.dtype not in _DTYPES:
        raise Refusal(adapter, f"the tensor {name[:120]} has the type {str(tensor.dtype).removeprefix('torch.')}")
    numbers = (tensor.float() * scale).to(dtype)
    if not bool(torch.isfinite(numbers).all()):
        raise Refusal(adapter, f"the tensor {name[:120]} has numbers that are not finite")
    return numbers
