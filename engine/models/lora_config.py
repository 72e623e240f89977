"""adapter_config.json of a LoRA adapter, as peft writes it: which layers it changes, with what rank and scale.

What would make the adapter compute something else than `scale * B A` beside a linear layer is refused in a sentence. A
foreign file's patterns are matched only if they cannot take long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config import Adapter, StartError
from engine.models.source import read_json

CONFIG_FILE = "adapter_config.json"
MAX_CONFIG_BYTES = 1 << 20
MAX_RANK = 4096
MAX_ALPHA = 1e6
_MAX_PATTERN = 200  # characters
_MAX_NAMES = 4096  # of layers in a field
_MAX_WAYS = 1 << 17  # in which all patterns of a field may be tried on a name
# A repeated group, and what changes how the rest is read: verbose patterns may hide a repetition behind blanks.
_HARD = re.compile(r"\)[*+{]|\(\?(?![:=!<])")
_NUM_ENDS = 32  # of a repetition in a name, or so
_REFUSED = (  # each changes what is computed, or more than linear layers
    *("use_dora", "lora_bias", "modules_to_save", "layer_replication", "trainable_token_indices"),
    *("target_parameters", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config"),
    *("kasa_config", "velora_config", "monteclora_config"),
)
_HARMLESS_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")  # others change the model's own weights


@dataclass(frozen=True, slots=True)
class LoraRules:
    """targets: layers by the end of their names; None: the file's tensors tell. layers: numbers of the decoder's
    layers that may be changed; None: all. may_lack: some of the targets may be without tensors."""

    rank: int
    alpha: float
    is_stabilised: bool
    targets: tuple[str, ...] | None
    layers: frozenset[int] | None
    may_lack: bool
    rank_patterns: tuple[tuple[re.Pattern[str], int], ...]
    alpha_patterns: tuple[tuple[re.Pattern[str], float], ...]

    def rank_of(self, path: str) -> int:
        return next((rank for pattern, rank in self.rank_patterns if pattern.fullmatch(path)), self.rank)

    def scale_of(self, path: str) -> float:
        """What B A is multiplied by."""
        alpha = next((alpha for pattern, alpha in self.alpha_patterns if pattern.fullmatch(path)), self.alpha)
        rank = self.rank_of(path)
        return alpha / math.sqrt(rank) if self.is_stabilised else alpha / rank

    def allow(self, path: str) -> bool:
        """True if tensors for this layer are to be expected."""
        number = layer_number(path)
        if self.layers is not None and number is not None and number not in self.layers:
            return False
        return self.targets is None or self.names(path)

    def names(self, path: str) -> bool:
        return any(path == target or path.endswith("." + target) for target in self.targets or ())


def layer_number(path: str) -> int | None:
    found = re.search(r"\.(\d{1,6})\.", path)
    return None if found is None else int(found[1])


class Refusal(StartError):
    def __init__(self, adapter: Adapter, reason: str) -> None:
        super().__init__(f"The adapter {adapter.name!r} at {adapter.path[:200]} cannot be served: {reason}.")


def read_rules(adapter: Adapter, folder: Path) -> LoraRules:
    """Raises StartError."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise Refusal(adapter, f"there is no {CONFIG_FILE}")
    num_bytes = path.stat().st_size
    if num_bytes > MAX_CONFIG_BYTES:
        raise Refusal(adapter, f"its {CONFIG_FILE} has {num_bytes} bytes")
    values = read_json(path)
    if str(values.get("peft_type")).upper() != "LORA":
        raise Refusal(adapter, f"peft_type is {_short(values.get('peft_type'))}, and only LORA is served")
    for name in _REFUSED:
        if values.get(name):
            raise Refusal(adapter, f"{name} is {_short(values[name])}")
    if values.get("bias") not in (None, "none"):
        raise Refusal(adapter, f"bias is {_short(values['bias'])}, and only none is served")
    if (start := values.get("init_lora_weights")) not in _HARMLESS_STARTS:
        raise Refusal(adapter, f"init_lora_weights is {_short(start)}, which changes the weights of the model itself")
    targets, layers = _targets(adapter, values), _layers(adapter, values)
    return LoraRules(
        rank=_rank(adapter, "r", values.get("r")),
        alpha=_alpha(adapter, "lora_alpha", values.get("lora_alpha")),
        is_stabilised=bool(values.get("use_rslora")),  # as peft reads it
        targets=targets,
        layers=layers,
        may_lack=layers is not None or bool(values.get("exclude_modules")),
        rank_patterns=tuple(
            (pattern, _rank(adapter, "rank_pattern", value))
            for pattern, value in _patterns(adapter, values, "rank_pattern")
        ),
        alpha_patterns=tuple(
            (pattern, _alpha(adapter, "alpha_pattern", value))
            for pattern, value in _patterns(adapter, values, "alpha_pattern")
        ),
    )


def _targets(adapter: Adapter, values: Mapping[str, Any]) -> tuple[str, ...] | None:
    """None for a pattern, and for "all-linear": peft has asked it when it made the tensors."""
    targets = values.get("target_modules")
    if isinstance(targets, str):
        return None
    if not isinstance(targets, list) or not targets or not all(isinstance(each, str) and each for each in targets):
        raise Refusal(adapter, f"target_modules is {_short(targets)}, neither a list of names nor a pattern")
    if len(targets) > _MAX_NAMES:
        raise Refusal(adapter, f"target_modules has {len(targets)} names, at most {_MAX_NAMES} are served")
    return tuple(targets)


def _layers(adapter: Adapter, values: Mapping[str, Any]) -> frozenset[int] | None:
    layers = values.get("layers_to_transform")
    if layers is None or layers == []:
        return None
    numbers = layers if isinstance(layers, list) else [layers]
    if not all(type(number) is int for number in numbers):
        raise Refusal(adapter, f"layers_to_transform is {_short(layers)}")
    return frozenset(numbers)


def _patterns(adapter: Adapter, values: Mapping[str, Any], field: str) -> list[tuple[re.Pattern[str], Any]]:
    """Names of layers, their ends, or expressions for these, as peft reads them."""
    given = values.get(field) or {}
    if not isinstance(given, dict):
        raise Refusal(adapter, f"{field} is {_short(given)}")
    if len(given) > _MAX_NAMES:
        raise Refusal(adapter, f"{field} has {len(given)} patterns, which may take long to match")
    patterns, ways = [], 0.0
    for text, value in given.items():
        if len(text) <= _MAX_PATTERN:
            ways += _ways(text)
        if len(text) > _MAX_PATTERN or ways > _MAX_WAYS or _HARD.search(text):
            raise Refusal(adapter, f"{field} has the pattern {_short(text)}, which may take long to match")
        try:
            patterns.append((re.compile(rf"(?:.*\.)?(?:{text})"), value))
        except (re.error, OverflowError, RecursionError) as error:
            raise Refusal(adapter, f"{field} has the pattern {_short(text)}, which is none ({error})") from error
    return patterns


def _ways(text: str) -> float:
    """In how many a pattern may be tried on a name, at most: a repetition may end at many characters, an option be
    there or not, and any branch of a group be taken (most ways if all groups have equally many)."""
    repeats = sum(map(text.count, "*+{"))
    options = text.count("?") - text.count("(?")
    groups = text.count("(") + 1
    return float(_NUM_ENDS) ** repeats * 2.0**options * (1 + text.count("|") / groups) ** groups


def _rank(adapter: Adapter, field: str, value: object) -> int:
    if type(value) is not int or not 1 <= value <= MAX_RANK:
        raise Refusal(adapter, f"{field} is {_short(value)}, and ranks from 1 to {MAX_RANK} are served")
    return value


def _alpha(adapter: Adapter, field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MAX_ALPHA:
        raise Refusal(adapter, f"{field} is {_short(value)}, and numbers up to {MAX_ALPHA:.0f} are served")
    return float(value)


def _short(value: object) -> str:
    return repr(value)[:80]
