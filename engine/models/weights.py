"""A model's numbers: config, parameter shapes and the tensors, whatever they are stored in.

Safetensors folders are mapped as they are. GGUF files are turned into transformers' parameters once per dtype and
kept as a safetensors file in the user's cache (`user_cache.py`), which later starts map; without a writable cache
they are turned anew into memory. The modelling code is other files' business.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.config import LoadFormat, StartError
from engine.models import config_facts, gguf_config, gguf_tensors, safetensors_files
from engine.models.gguf import GgufFile, TensorInfo
from engine.models.gguf_quantised import own_format
from engine.models.quantised import QuantFormat, QuantisedWeight
from engine.models.source import Source, read_json
from engine.models.tensor_names import CHOOSERS, stored_name
from engine.models.user_cache import cache_root, check_room, content_hash, write_atomically, write_bytes

logger = logging.getLogger(__name__)

_FORMAT = 1  # of cached weights: raise it when the derivation changes


class Weights(ABC):
    """hf_config: config.json or its equivalent; generation_config: {} if there is none; content_hash: hex, equal for
    equal weights and config; shapes: parameter name -> shape in transformers' terms; num_parameters: stored numbers,
    tied ones once; is_dummy: there are no tensors, whoever builds the model fills them; gguf_metadata: that of the
    file, which has the tokenizer too, None for folders."""

    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    content_hash: str
    shapes: dict[str, tuple[int, ...]]
    is_dummy = False
    gguf_metadata: dict[str, Any] | None = None

    @property
    def architecture(self) -> str:
        return config_facts.architecture(self.hf_config)

    @property
    def num_parameters(self) -> int:
        return sum(map(prod, self.shapes.values()))

    @abstractmethod
    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """(transformers parameter name, tensor in `dtype`) for every stored parameter. Tensors may be views of a
        mapped file, private to this process: writing to one copies its pages. Raises StartError."""

    def some_tensors(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """`tensors` for a reader who leaves most of them alone: each may be made when it is asked for, every time."""
        return dict(self.tensors(dtype))

    def streamed(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        """`tensors` for a reader who takes each away, one after the other: where that is possible none is read, or
        turned into `dtype`, before it is asked for."""
        return dict(self.tensors(dtype))

    def quantised(self, name: str) -> QuantisedWeight | None:
        """A matrix in the smallest form that holds what is stored; None if that is floating point. Raises
        StartError."""
        return None

    def quantised_format(self, name: str) -> QuantFormat | None:
        """That of `quantised(name)`, without reading it."""
        return None


def open_weights(source: Source, *, cache_dir: str | None = None, load_format: LoadFormat = "auto") -> Weights:
    """Reads config and headers, no tensors. Raises StartError."""
    if source.kind == "gguf":
        if load_format not in ("auto", "gguf"):
            raise StartError(f"{source.origin} is a GGUF file, but --load-format asks for {load_format}.")
        return GgufWeights(source.path, cache_root(cache_dir))
    if load_format == "gguf":
        raise StartError(f"{source.origin} has no GGUF file, but --load-format asks for one.")
    return DummyWeights(source.path) if load_format == "dummy" else FolderWeights(source.path)


class _Folder(Weights):
    """config.json and generation_config.json of a folder, checked for code."""

    def __init__(self, folder: Path) -> None:
        self.hf_config = read_json(folder / "config.json")
        config_facts.check_no_code(self.hf_config, folder)
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self.shapes = {}


class DummyWeights(_Folder):
    """A config without numbers."""

    is_dummy = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.content_hash = hashlib.blake2b(b"dummy" + _canonical(self.hf_config), digest_size=32).hexdigest()

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("dummy weights are filled by whoever builds the model")


class FolderWeights(_Folder):
    """Safetensors, in one file or in shards."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._shards = safetensors_files.open_folder(folder)
        for shard in self._shards:
            self.shapes.update(shard.shapes)
        self.content_hash = self._hash()

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        for shard in self._shards:
            for name, tensor in shard.tensors():
                yield name, _in_dtype(name, tensor, dtype)

    def streamed(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        return _Streamed(self._shards, dtype)

    def _hash(self) -> str:
        """Config, headers, and sizes and times of the files. Nothing that is computed from the tensors is stored
        under this hash, only the verdict of the self-check on this config, so a hundred gigabytes need not be read:
        a copied folder has its self-check once more, that is all."""
        digest = hashlib.blake2b(_canonical(self.hf_config), digest_size=32)
        for shard in self._shards:
            stat = shard.path.stat()
            digest.update(f"\0{shard.path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
            digest.update(shard.header)
        return digest.hexdigest()


def _in_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """What decides between experts stays as it is: who needs it in 16 bits rounds it."""
    return tensor.to(dtype) if tensor.is_floating_point() and not name.endswith(CHOOSERS) else tensor


class _Streamed(Mapping[str, Tensor]):
    """Tensors of safetensors files, each read when somebody looks at its numbers and turned into `dtype` when it is
    asked for."""

    def __init__(self, shards: list[safetensors_files.Shard], dtype: torch.dtype) -> None:
        self._reader_of = {name: read for shard in shards for read in (shard.reader(),) for name in shard.shapes}
        self._dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        return _in_dtype(name, self._reader_of[name](name), self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._reader_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader_of)

    def __len__(self) -> int:
        return len(self._reader_of)


class GgufWeights(Weights):
    """One GGUF file, its metadata as config and its tensors as parameters."""

    def __init__(self, path: Path, root: Path) -> None:
        self.gguf = GgufFile(path)
        self.gguf_metadata = self.gguf.metadata
        self.hf_config = gguf_config.hf_config(self.gguf)
        self.generation_config = gguf_config.generation_config(self.gguf)
        self._infos = gguf_tensors.parameters(self.gguf, gguf_config.family(self.gguf))
        self.shapes = {parameter: info.shape for parameter, info in self._infos.items()}
        self.content_hash = content_hash(path, root)
        self._folder = root / "gguf" / self.content_hash[:32]

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        path = self._folder / f"weights-{_FORMAT}-{str(dtype).removeprefix('torch.')}.safetensors"
        shard = self._cached(path)
        if shard is None:
            try:
                check_room(self._folder, self.num_parameters * dtype.itemsize)
                write_atomically(
                    path, lambda file: safetensors_files.write_file(file, self.shapes, dtype, self._derived(dtype))
                )
                _seal(path)
                shard = self._cached(path)
            except OSError as error:
                logger.warning("The weights cannot be kept in %s (%s); the next start takes longer.", path, error)
        if shard is not None:
            yield from shard.tensors()
        else:
            yield from zip(self.shapes, self._derived(dtype), strict=True)

    def some_tensors(self, dtype: torch.dtype) -> Mapping[str, Tensor]:
        return _Derived(self, dtype)

    def quantised(self, name: str) -> QuantisedWeight | None:
        info = self._info(name)
        return gguf_tensors.quantised_parameter(self.gguf, info, gguf_config.family(self.gguf), self.hf_config)

    def quantised_format(self, name: str) -> QuantFormat | None:
        return own_format(self._info(name).kind)

    def _info(self, name: str) -> TensorInfo:
        """name: in whatever dialect. Raises KeyError."""
        return self._infos[stored_name(name, self._infos) or name]

    def derive(self, name: str, dtype: torch.dtype) -> Tensor:
        """One parameter in `dtype`, past the cache. Raises KeyError, GgufError."""
        info = self._info(name)
        return gguf_tensors.parameter(self.gguf, info, gguf_config.family(self.gguf), self.hf_config, dtype)

    def _cached(self, path: Path) -> safetensors_files.Shard | None:
        """The cached file if it is whole: right shapes, full length, and untouched since it was written."""
        try:
            if not path.is_file() or not _is_sealed(path):
                return None
            shard = safetensors_files.open_shard(path)
        except (OSError, StartError):
            return None
        return shard if shard.shapes == self.shapes else None

    def _derived(self, dtype: torch.dtype) -> Iterator[Tensor]:
        for name in self._infos:
            yield self.derive(name, dtype)


class _Derived(Mapping[str, Tensor]):
    """A GGUF file's parameters, made anew at every look."""

    def __init__(self, weights: GgufWeights, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._weights.derive(name, self._dtype)

    def __contains__(self, name: object) -> bool:
        return name in self._weights.shapes

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights.shapes)

    def __len__(self) -> int:
        return len(self._weights.shapes)


def _seal(path: Path) -> None:
    """Notes the finished file's identity beside it, so that a file touched later by whatever is not believed."""
    write_bytes(path.with_suffix(".json"), json.dumps(_identity(path)).encode())


def _is_sealed(path: Path) -> bool:
    try:
        return bool(json.loads(path.with_suffix(".json").read_bytes()) == _identity(path))
    except (OSError, ValueError):
        return False


def _identity(path: Path) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns]


def _canonical(config: dict[str, Any]) -> bytes:
    return json.dumps(config, sort_keys=True, default=str).encode()
