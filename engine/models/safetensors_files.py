"""The safetensors format, checked before it is mapped, and written one tensor at a time.

A file is 8 bytes of length, a JSON header (name -> dtype, shape, byte range) and the bytes. The checks here turn a
truncated or foreign file into one sentence; mapping the checked file is left to the safetensors library, which
reads no byte before a tensor is used.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.config import StartError
from engine.models.source import read_json

INDEX_FILE = "model.safetensors.index.json"
_UNREADABLE = (
    *(OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError, SafetensorError),
    MemoryError,  # from the library: more bytes than this process may map
)
_MAX_HEADER = 100_000_000  # bytes; the library's own limit
_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


@dataclass(frozen=True, slots=True)
class Shard:
    """One checked file. shapes: of all its tensors; header: its JSON bytes (they name every byte range)."""

    path: Path
    shapes: dict[str, tuple[int, ...]]
    header: bytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Views of the mapped file, copied page by page only where somebody writes."""
        with safe_open(str(self.path), framework="pt") as file:
            for name in self.shapes:
                yield name, file.get_tensor(name)

    def reader(self) -> Callable[[str], Tensor]:
        """Of single ones by name. The file is mapped as long as this is kept."""
        file: Any = safe_open(str(self.path), framework="pt")
        return lambda name: cast(Tensor, file.get_tensor(name))


def open_shard(path: Path, max_header: int = _MAX_HEADER) -> Shard:
    """Reads and checks the header, which has up to `max_header` bytes. Raises StartError."""
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for
            raise ValueError("it is no regular file")
        with path.open("rb") as file:
            size = path.stat().st_size
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= size - 8:
                raise ValueError("its header is cut short or no header at all")
            if length > max_header:
                raise ValueError(f"its header has {length} bytes, more than {max_header}")
            header = file.read(length)
        shapes = _check(json.loads(header), size - 8 - length)
        with safe_open(str(path), framework="pt"):  # the library's own opinion, before anything depends on it
            pass
    except _UNREADABLE as error:
        raise StartError(f"{path} is not a readable safetensors file ({_reason(error)}).") from error
    return Shard(path, shapes, header)


def open_folder(folder: Path) -> list[Shard]:
    """The shards of a model folder: those its index names, or all its files. Raises StartError."""
    index = folder / INDEX_FILE
    single = folder / "model.safetensors"
    if not index.is_file():
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        return _without_doubles([open_shard(path) for path in paths])
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise StartError(f"Cannot read {index}: it has no weight_map.")
    shards = []
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise StartError(f"{index} names the file {name[:80]!r}, which is not a .safetensors file in its folder.")
        if not (folder / name).is_file():
            raise StartError(f"{folder} is incomplete: {name} is missing.")
        shards.append(open_shard(folder / name))
    absent = set(weight_map).difference(*(shard.shapes for shard in shards))
    if absent:
        raise StartError(f"{folder} is incomplete: no file has the tensor {sorted(absent)[0]}.")
    return _without_doubles(shards)


def write_file(
    file: BinaryIO, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[Tensor]
) -> None:
    """Writes a safetensors file: `tensors` in the order of `shapes`, all of `dtype`, held one at a time."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start aligned
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
    for tensor in tensors:
        file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _check(header: dict[str, Any], num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Shapes by name, once every range fits its shape and the ranges cover the data without gaps."""
    ranges = []
    shapes = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        shapes[name] = tuple(entry["shape"])
        if end - start != prod(shapes[name]) * _BYTES.get(entry["dtype"], 1):
            raise ValueError(f"tensor {name[:60]} has a shape that does not fit its bytes")
        ranges.append((start, end))
    reached = 0
    for start, end in sorted(ranges):
        if start != reached:
            raise ValueError("its tensors do not lie side by side")
        reached = end
    if reached != num_bytes:
        raise ValueError("it is cut short" if reached > num_bytes else "it has bytes that belong to no tensor")
    return shapes


def _without_doubles(shards: list[Shard]) -> list[Shard]:
    seen: set[str] = set()
    for shard in shards:
        if twice := seen & shard.shapes.keys():
            raise StartError(f"{shard.path.parent} has the tensor {sorted(twice)[0]} in two files.")
        seen |= shard.shapes.keys()
    return shards


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return str(error) if type(error) is ValueError else "its header is broken"
