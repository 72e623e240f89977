"""Calls the kernels' launchers (csrc/cuda/*.cu) with torch tensors: emulated ones with tensors of the CPU, compiled
ones with tensors of the GPU. One calling convention for both: pointers, int64, float, and at last the stream.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from tests.emulation.build import build, default_target

Argument = Tensor | int | float | bool | None

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
"""ElementCode of csrc/cuda/numbers.cuh."""


def _c_value(argument: Argument) -> ctypes.c_void_p | ctypes.c_int64 | ctypes.c_float:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int64(int(argument))


class Launchers:
    """launch("rms_norm", ...) calls pagemill_rms_norm. Python floats become float, ints and bools int64_t, None a null
    pointer; tensors must outlive what runs on the stream."""

    def __init__(self, path: Path) -> None:
        self.loaded = ctypes.CDLL(str(path))

    def stream(self) -> int:
        return 0

    def launch(self, name: str, *arguments: Argument) -> None:
        """Raises RuntimeError if the launcher returns an error."""
        function = getattr(self.loaded, f"pagemill_{name}")
        status = function(*map(_c_value, arguments), ctypes.c_void_p(self.stream()))
        if status != 0:
            raise RuntimeError(f"{name}: error {status}{self.report()}")

    def number(self, name: str, *arguments: int) -> int:
        """What pagemill_NAME, no launcher but a question to one, answers."""
        function = getattr(self.loaded, f"pagemill_{name}")
        function.restype = ctypes.c_int64
        return int(function(*map(ctypes.c_int64, arguments)))

    def report(self) -> str:
        return ""


class EmulatedLaunchers(Launchers):
    """The emulated kernels. seed: the order in which threads run."""

    def __init__(self, path: Path | None = None, seed: int = 0) -> None:
        super().__init__(path or build(default_target()))
        self.loaded.emulation_report.restype = ctypes.c_char_p
        self.set_seed(seed)

    def set_seed(self, seed: int) -> None:
        self.loaded.emulation_seed(ctypes.c_uint64(seed))

    def report(self) -> str:
        text: bytes = self.loaded.emulation_report()
        return f": {text.decode()}" if text else ""


class DeviceLaunchers(Launchers):
    """The kernels compiled by nvcc, on torch's current stream."""

    def stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def report(self) -> str:
        return " (see cudaError_t)"
