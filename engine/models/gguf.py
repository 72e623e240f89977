"""Reads the header of a GGUF file (version 2 and 3, little-endian) and hands out its tensors as mapped bytes.

A parser of our own, because the `gguf` package builds one numpy view per vocabulary entry (4 s for SmolLM2, 40 ms
here) and because a model file is input from outside: every count and offset is checked against the file before it
is used, and whatever is wrong becomes one `GgufError` sentence. What the numbers of a quantised tensor mean is the
business of `dequantize.py`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from engine.config import StartError

_MAX_ITEMS = 1 << 24  # entries of one array, tensors, metadata keys
_MAX_DIMS = 4

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SCALAR_STRUCTS = {kind: struct.Struct(code) for kind, code in _SCALARS.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


class GgufError(StartError):
    """The file is no GGUF file this reader understands."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. shape: outermost dimension first, as torch has it; offset: bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int

    @property
    def num_elements(self) -> int:
        return prod(self.shape)

    def along_first(self) -> list[TensorInfo]:
        """The tensors of which it is made, one after another; quantised or not, none shares a block with the next."""
        count, num_bytes = self.shape[0], self.num_bytes // self.shape[0]
        return [
            replace(self, shape=self.shape[1:], offset=self.offset + index * num_bytes, num_bytes=num_bytes)
            for index in range(count)
        ]


class GgufFile:
    """An opened file. metadata: key -> bool, int, float, str or a list of one of them."""

    def __init__(self, path: Path) -> None:
        """Raises GgufError."""
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise GgufError(f"Cannot read {path}: {error}.") from error
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError) as error:
            raise GgufError(f"{path} is not a readable GGUF file ({_reason(error)}).") from error

    def data(self, name: str) -> np.ndarray:
        """The tensor's stored bytes, [num_bytes] uint8, read-only view of the file."""
        return self.data_of(self.tensors[name])

    def data_of(self, info: TensorInfo) -> np.ndarray:
        """Likewise, of a tensor or a part of one."""
        return np.frombuffer(self._map, np.uint8, info.num_bytes, info.offset)

    def _read_header(self) -> None:
        cursor = _Cursor(self._map)
        if self._map[:4] != b"GGUF":
            raise ValueError("it does not start with GGUF")
        cursor.at = 4
        version = cursor.number(_U32)
        if version not in (2, 3):
            raise ValueError(f"format version {version:#x}; versions 2 and 3, little-endian, are supported")
        num_tensors = cursor.count("tensors")
        num_keys = cursor.count("metadata keys")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.text()
            self.metadata[key] = cursor.value(cursor.number(_U32))
        infos = [self._tensor_info(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"alignment {alignment} is no power of two")
        start = -(-cursor.at // alignment) * alignment
        self.tensors: dict[str, TensorInfo] = {}
        for info in infos:
            placed = TensorInfo(info.name, info.shape, info.kind, start + info.offset, info.num_bytes)
            if placed.offset + placed.num_bytes > len(self._map):
                raise ValueError(f"it is cut short: tensor {info.name} ends past the end of the file")
            if info.name in self.tensors:
                raise ValueError(f"tensor {info.name} occurs twice")
            self.tensors[info.name] = placed

    def _tensor_info(self, cursor: _Cursor) -> TensorInfo:
        name = cursor.text()
        num_dims = cursor.number(_U32)
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name[:60]} has {num_dims} dimensions")
        shape = tuple(cursor.number(_U64) for _ in range(num_dims))[::-1]
        kind = GGMLQuantizationType(cursor.number(_U32))
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        offset = cursor.number(_U64)
        if not shape or 0 in shape or shape[-1] % block_size:
            raise ValueError(f"tensor {name[:60]} of type {kind.name} has the shape {shape}")
        return TensorInfo(name, shape, kind, offset, prod(shape) // block_size * block_bytes)


class _Cursor:
    """A position in the mapped file; every read moves it and raises ValueError past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._size = len(data)
        self.at = 0

    def number(self, layout: struct.Struct) -> int:
        (value,) = layout.unpack_from(self._data, self._advance(layout.size))
        return int(value)

    def count(self, what: str) -> int:
        value = self.number(_U64)
        if value > _MAX_ITEMS or value > self._size:
            raise ValueError(f"{value} {what}")
        return value

    def text(self) -> str:
        length = self.number(_U64)
        start = self._advance(length)
        return self._data[start : start + length].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind == _ARRAY:
            return self._array()
        layout = _SCALAR_STRUCTS[kind]
        return layout.unpack_from(self._data, self._advance(layout.size))[0]

    def _array(self) -> list[Any]:
        kind = self.number(_U32)
        length = self.count("array entries")
        if kind == _STRING:
            return self._texts(length)
        if kind == _ARRAY:
            raise ValueError("an array of arrays")
        layout = _SCALAR_STRUCTS[kind]
        start = self._advance(layout.size * length)
        code = _SCALARS[kind]
        values: list[Any] = np.frombuffer(self._data, code, length, start).tolist()
        return values

    def _texts(self, length: int) -> list[str]:
        """Hundreds of thousands of vocabulary entries: the loop keeps everything in local names."""
        data, at, size = self._data, self.at, self._size
        unpack: Callable[..., tuple[int]] = _U64.unpack_from
        texts = []
        for _ in range(length):
            (num_bytes,) = unpack(data, at)
            at += 8 + num_bytes
            if at > size:
                raise ValueError("it is cut short within its metadata")
            texts.append(data[at - num_bytes : at].decode("utf-8", "replace"))
        self.at = at
        return texts

    def _advance(self, num_bytes: int) -> int:
        start = self.at
        if num_bytes > self._size - start:
            raise ValueError("it is cut short within its metadata")
        self.at = start + num_bytes
        return start


def _reason(error: Exception) -> str:
    if isinstance(error, ValueError) and not isinstance(error, UnicodeDecodeError):
        return str(error)
    if isinstance(error, KeyError):
        return f"unknown value type {error}"
    return "its metadata is broken"
