"""From a config and a stream of named tensors to a transformers tree with its weights in place.

The tree is built on the device with initialisation switched off, not on meta: constructors then compute the
buffers that no checkpoint holds (rotary frequencies, embedding scales) correctly, and parameters cost only
untouched address space until the checkpoint's tensors take their place, without a copy.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.initialization import no_init_weights
from transformers.modeling_utils import LoadStateDictConfig, local_torch_dtype

from engine.config import StartError
from engine.models.allow import float32_parameters, model_class, one_line
from engine.models.tensor_names import CHOOSING

logger = logging.getLogger("pagemill.engine")

NOISE_STD = 0.02  # of dummy weights


def build_tree(config: Any, dtype: torch.dtype, implementation: str) -> Any:
    """The ForCausalLM tree for `config`, parameters uninitialised, buffers right, ready for inference.

    Raises StartError if the attention implementation did not take."""
    cls = model_class(config)
    config._attn_implementation = implementation
    try:
        with local_torch_dtype(dtype), no_init_weights():
            tree = cls(config)
    except Exception as error:  # modelling code meets a config it was not written for: any kind of error
        raise StartError(
            f"A model of type {config.model_type!r} cannot be built from its config: {one_line(error)}."
        ) from error
    tree.tie_weights(recompute_mapping=False)
    if tree.config._attn_implementation != implementation:
        raise StartError(f"Model type {config.model_type!r} refused the attention implementation {implementation!r}.")
    for name, part in (*tree.named_parameters(), *tree.named_buffers()):
        if part.is_meta:
            raise StartError(f"{name} of model type {config.model_type!r} has no storage after building the model.")
    tree.requires_grad_(False)
    return tree.eval()


def tensors_of(tree: nn.Module) -> dict[str, Tensor]:
    """Its parameters, and those buffers that checkpoints hold, by name."""
    corrections = {name: buffer for name, buffer in tree.named_buffers() if name.endswith(CHOOSING)}
    return dict(tree.named_parameters()) | corrections


def assign_weights(tree: Any, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> None:
    """Put checkpoint tensors in the place of the tree's parameters, without a copy where dtypes agree.

    Names are those of transformers' checkpoints; where a checkpoint is laid out otherwise than the modules
    (expert lists against fused experts), transformers' own conversion does the work.
    Raises StartError on missing tensors and unexpected shapes."""
    slots = dict(tree.state_dict(keep_vars=True))
    missing, strangers = set(slots), dict[str, Tensor]()
    keep_float32 = float32_parameters(tree, dtype)
    for name, tensor in tensors:
        target = name if name in slots else _language_name(name, slots)
        if target is None:
            strangers[name] = tensor
            continue
        wanted = torch.float32 if any(part in target for part in keep_float32) else dtype
        _place(tree, target, slots[target], tensor.to(wanted))
        missing.discard(target)
    _tie(tree, missing)
    if missing and strangers:
        missing = _convert(tree, missing, strangers, dtype)
        strangers = {}  # it has taken what it could name
    if missing:
        raise StartError(
            f"The weights lack {len(missing)} of {len(slots)} tensors that a {type(tree).__name__} needs, the first "
            f"being {min(missing)}."
        )
    _report_unused(tree, strangers)


def _report_unused(tree: Any, strangers: Mapping[str, Tensor]) -> None:
    """Say which tensors no part of the model has asked for, unless the model declares that it ignores them."""
    ignored = getattr(tree, "_keys_to_ignore_on_load_unexpected", None) or ()
    unused = [name for name in strangers if not any(re.search(pattern, name) for pattern in ignored)]
    unused = [name for name in unused if not name.endswith("inv_freq")]  # old checkpoints kept these buffers
    if unused:
        logger.warning(
            "%d tensors of the weights are not part of the model that config.json describes, the first being %s",
            len(unused),
            min(unused),
        )


def _language_name(name: str, slots: dict[str, Any]) -> str | None:
    """A multimodal checkpoint's name for a tensor of its language model, or a bare base model's, as ours."""
    for prefix, replacement in (
        ("language_model.", ""),
        ("model.language_model.", "model."),
        ("language_model.model.", "model."),
        ("", "model."),
        ("", "transformer."),
    ):
        candidate = replacement + name.removeprefix(prefix) if name.startswith(prefix) else None
        if candidate in slots:
            return candidate
    return None


def _place(tree: nn.Module, name: str, slot: Tensor, tensor: Tensor) -> None:
    if tensor.shape != slot.shape:
        raise StartError(f"Tensor {name} has shape {list(tensor.shape)}, but config.json implies {list(slot.shape)}.")
    path, _, leaf = name.rpartition(".")
    owner = tree.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[leaf] = tensor


def _tie(tree: Any, missing: set[str]) -> None:
    """Share tensors the config declares tied; a tied name is not missing if its partner is there."""
    tied: dict[str, str] = dict(tree.all_tied_weights_keys)
    tree.tie_weights(missing_keys=missing, recompute_mapping=False)
    for target, source in tied.items():
        if target not in missing or source not in missing:
            missing -= {target, source}


def _convert(tree: Any, missing: set[str], strangers: dict[str, Tensor], dtype: torch.dtype) -> set[str]:
    """Let transformers rename, merge and split what did not match by name. Returns what is still missing."""
    load = LoadStateDictConfig(dtype=dtype, weight_mapping=get_model_conversion_mapping(tree))
    result = convert_and_load_state_dict_in_model(tree, strangers, load)
    info = result[0] if isinstance(result, tuple) else result
    if info.conversion_errors:
        raise StartError(f"The weights could not be converted: {next(iter(info.conversion_errors.values()))}.")
    tree.requires_grad_(False)
    return missing & set(info.missing_keys)


@torch.no_grad()
def fill_dummy(tree: nn.Module, seed: int, *, shared: bool = False) -> None:
    """Cheap reproducible weights: one block of noise, repeated. Norm weights and biases stay neutral.

    shared: the same numbers in the memory of the largest weight alone, for a tree that only others copy from."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(1 << 18, generator=generator) * NOISE_STD
    matrices = [parameter for parameter in tree.parameters() if parameter.dim() >= 2]
    wells = {} if not shared else {dtype: _well(matrices, dtype, noise) for dtype in {m.dtype for m in matrices}}
    for module in tree.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() >= 2 and shared:
                parameter.data = wells[parameter.dtype][: parameter.numel()].view(parameter.shape)
            elif parameter.dim() >= 2:
                _tile(parameter, noise)
            elif isinstance(module, nn.LayerNorm) and name == "weight":
                parameter.fill_(1.0)
            elif name == "bias" or not _is_neutral(parameter):
                parameter.zero_()


def _well(matrices: list[nn.Parameter], dtype: torch.dtype, noise: Tensor) -> Tensor:
    """[elements of the largest of them]: repeated noise begins the same way in each."""
    well = torch.empty(max(matrix.numel() for matrix in matrices if matrix.dtype == dtype), dtype=dtype)
    _tile(well, noise)
    return well


class DummyTensors(Mapping[str, Tensor]):
    """The parameters of a tree that fill_dummy gave shared memory, each with memory of its own on `device`, where they
    are made."""

    def __init__(self, tree: nn.Module, device: torch.device) -> None:
        self._parameters = tensors_of(tree)
        self._device = device
        self._wells: dict[torch.dtype, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        parameter = self._parameters[name].detach()
        if parameter.dim() < 2:
            return parameter
        if parameter.dtype not in self._wells:
            same = [each.detach() for each in self._parameters.values() if each.dtype == parameter.dtype]
            largest = max((each for each in same if each.dim() >= 2), key=torch.numel)
            self._wells[parameter.dtype] = largest.to(self._device).view(-1)
        return self._wells[parameter.dtype][: parameter.numel()].view(parameter.shape).clone()

    def __contains__(self, name: object) -> bool:
        return name in self._parameters

    def __iter__(self) -> Iterator[str]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)


def _is_neutral(parameter: Tensor) -> bool:
    """Still what a constructor put there (ones or zeros), not uninitialised memory."""
    return bool(((parameter == 0) | (parameter == 1)).all())


def _tile(parameter: Tensor, noise: Tensor) -> None:
    flat = parameter.view(-1)
    source = noise.to(parameter.dtype)
    for start in range(0, flat.numel(), noise.numel()):
        piece = flat[start : start + noise.numel()]
        piece.copy_(source[: piece.numel()])
