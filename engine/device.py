"""Where an engine computes, and the one object through which it moves bytes there and back.

`choose_device` decides once, at start. A `Lane` is what only a device has - pinned memory, copies that run on,
events - behind two implementations: `CudaLane`, and `HostLane` for tensors of the CPU, so that all code around it is
the same on both. Whoever owns a lane uses it from one thread.
"""

from __future__ import annotations

import logging
import platform
import re
import time
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine import ops
from engine.config import StartError

logger = logging.getLogger("pagemill.engine")

LEAST_CAPABILITY = (8, 0)  # of what csrc/cuda is built for: bfloat16 products and asynchronous copies


@dataclass(frozen=True, slots=True)
class Device:
    """torch_device has its index. capability: the CUDA compute capability, None on the CPU."""

    torch_device: torch.device
    name: str  # as its maker calls it; of the CPU "cpu-x86_64" and the like
    memory_total: int = 0  # bytes; 0 on the CPU, whose memory engine/memory.py knows
    capability: tuple[int, int] | None = None

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def lane(self) -> Lane:
        return CudaLane(self.torch_device) if self.is_cuda else HostLane()

    def free_memory(self) -> int:
        """Bytes, of a CUDA device: what nobody has taken."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])


HOST = torch.device("cpu")
CPU = Device(HOST, f"cpu-{platform.machine()}")


# ---- the choice -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CudaFacts:
    """What decides about CUDA, as data: tests make up machines that are not here."""

    torch_version: str
    torch_has_cuda: bool
    has_library: bool = False  # _C_cuda is loaded
    failure: str = ""  # why torch finds no device that works
    names: tuple[str, ...] = ()  # of the devices, as the next two
    capabilities: tuple[tuple[int, int], ...] = ()
    memory_totals: tuple[int, ...] = ()


def choose_device(name: str) -> Device:
    """`name`: "auto", "cpu", "cuda" or "cuda:N". auto is the first CUDA device if there is one that works, else the
    CPU; in a torch without CUDA it looks no further. Raises StartError with one sentence."""
    if name == "cpu" or (name == "auto" and torch.version.cuda is None):
        return CPU
    return decide(name, read_facts())


def read_facts() -> CudaFacts:
    """Of this process. Creates no CUDA context unless a device is there."""
    facts = CudaFacts(torch.__version__, torch.version.cuda is not None)
    if not facts.torch_has_cuda:
        return facts
    has_library = ops.CUDA_LIBRARY is not None
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # torch leaves it untyped; it tells why there is no device
        numbers = range(torch.cuda.device_count())
        return CudaFacts(
            facts.torch_version,
            True,
            has_library,
            "" if numbers else "no device is visible",
            tuple(torch.cuda.get_device_name(number) for number in numbers),
            tuple(torch.cuda.get_device_capability(number) for number in numbers),
            tuple(torch.cuda.get_device_properties(number).total_memory for number in numbers),
        )
    except (RuntimeError, AssertionError) as error:
        return CudaFacts(facts.torch_version, True, has_library, _first_sentence(error))


def decide(name: str, facts: CudaFacts) -> Device:
    """choose_device without the looking. Raises StartError."""
    found = re.fullmatch(r"auto|cpu|cuda(?::(\d{1,3}))?", name)
    if found is None:
        raise StartError(f"--device must be auto, cpu, cuda or cuda:N, got {name!r}.")
    if name == "cpu":
        return CPU
    number = int(found[1] or 0)
    complaint = _complaint(name, number, facts)
    if complaint is None:
        return Device(
            torch.device("cuda", number), facts.names[number], facts.memory_totals[number], facts.capabilities[number]
        )
    if name != "auto":
        raise StartError(complaint)
    if facts.names:  # a device that could serve and will not is worth a line
        logger.warning("%s Serving from the CPU.", complaint)
    return CPU


def _complaint(name: str, number: int, facts: CudaFacts) -> str | None:
    """Why device `number` cannot serve; None if it can."""
    asked = "a CUDA device" if name == "auto" else f"--device {name}"
    if not facts.torch_has_cuda:
        return f"{asked} needs a torch with CUDA, and torch {facts.torch_version} here is one without."
    if facts.failure:
        return f"{asked} was asked for, but torch finds no CUDA device that works: {facts.failure}."
    if number >= len(facts.names):
        return f"{asked} was asked for, but there are {len(facts.names)} CUDA devices here, counted from 0."
    if facts.capabilities[number] < LEAST_CAPABILITY:
        found, least = (".".join(map(str, pair)) for pair in (facts.capabilities[number], LEAST_CAPABILITY))
        return f"{facts.names[number]} has compute capability {found}; the kernels need {least} or more."
    if not facts.has_library:
        return (
            f"{facts.names[number]} is there, but the kernels for it (_C_cuda) are not: install Pagemill where nvcc "
            "is found, or a wheel that was built so."
        )
    return None


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text.split(". ")[0].rstrip(".") or type(error).__name__)[:200]


# ---- bytes there and back -------------------------------------------------------------------------------------


class Mark(Protocol):
    """A point in the device's work."""

    def wait(self) -> None:
        """Returns when all work issued before the mark is done, and what it copied to the host is there. Other
        threads of the interpreter run meanwhile. May be called again."""
        ...


class Stamp(Protocol):
    """A time in the device's work."""

    def seconds_since(self, earlier: Stamp) -> float:
        """Of the device's time. To be asked behind a mark that was issued after both."""
        ...


class Lane(Protocol):
    """One stream of work: what is issued first is done first, the caller's kernels included."""

    device: torch.device

    def staging(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of the host, in memory that the device can read and write by itself; uninitialised."""
        ...

    def to_device(self, host: Tensor, out: Tensor) -> None:
        """Copy, of equal shape and dtype. May run on: `host` (of staging) stays as it is until a later mark is
        reached."""
        ...

    def to_host(self, tensor: Tensor, out: Tensor) -> Mark:
        """Copy into `out` (of staging), which may be read once the mark is reached."""
        ...

    def mark(self) -> Mark: ...

    def stamp(self) -> Stamp: ...

    def synchronize(self) -> None:
        """Wait for everything."""
        ...


class CudaLane:
    """The current stream of the thread that uses it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def to_device(self, host: Tensor, out: Tensor) -> None:
        out.copy_(host, non_blocking=True)

    def to_host(self, tensor: Tensor, out: Tensor) -> Mark:
        out.copy_(tensor, non_blocking=True)
        return self.mark()

    def mark(self) -> Mark:
        return _CudaMark(torch.cuda.current_stream(self.device))

    def stamp(self) -> Stamp:
        return _CudaStamp(torch.cuda.current_stream(self.device))

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()


class _CudaMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: the waiting thread sleeps, for its core may be the event loop's
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()  # without the interpreter's lock


class _CudaStamp:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # as Stream
        self.event.record(stream)

    def seconds_since(self, earlier: Stamp) -> float:
        assert isinstance(earlier, _CudaStamp)
        return float(earlier.event.elapsed_time(self.event)) / 1000


class HostLane:
    """Everything is done when the call returns."""

    device = HOST

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def to_device(self, host: Tensor, out: Tensor) -> None:
        out.copy_(host)

    def to_host(self, tensor: Tensor, out: Tensor) -> Mark:
        out.copy_(tensor)
        return self.mark()

    def mark(self) -> Mark:
        return _Reached()

    def stamp(self) -> Stamp:
        return _HostStamp()

    def synchronize(self) -> None:
        return None


class _HostStamp:
    def __init__(self) -> None:
        self.time_s = time.monotonic()

    def seconds_since(self, earlier: Stamp) -> float:
        assert isinstance(earlier, _HostStamp)
        return self.time_s - earlier.time_s


class _Reached:
    def wait(self) -> None:
        return None


# ---- errors ---------------------------------------------------------------------------------------------------


REFUSED_LAUNCHES = frozenset({1, 9, 98, 209, 701})
"""Status of a kernel of ours that never began: a size it cannot have, no code for this device, too many registers."""


_UNNAMED = re.compile(r'"aten::new_empty".*API call failed', re.DOTALL)
"""What is left of torch's own error where an op of ours asks for its result's memory. A device that is lost looks the
same there, and shows in whatever waits for it next."""


def _launch_status(error: BaseException) -> int | None:
    """The number that an op of ours reports; None if it is no such error."""
    found = re.search(r"pagemill\.\w+: launch: CUDA error (\d+)", str(error))
    return None if found is None else int(found[1])


def is_out_of_memory(error: BaseException) -> bool:
    """The device or the host had too little memory for something; what was there before is as it was."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    is_of_torch = "CUDA error: out of memory" in text or _launch_status(error) == 2
    return isinstance(error, RuntimeError) and (is_of_torch or _UNNAMED.search(text) is not None)


def give_back_memory() -> None:
    """What torch's allocator keeps for later goes back to the device, so that an allocation of another size may
    succeed."""
    if torch.version.cuda is not None and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # as above
        torch.cuda.empty_cache()


def is_fatal(error: BaseException) -> bool:
    """True for an error of CUDA after which this process can use the device no more: an address that is not ours, a
    trap, a lost device. They show in whatever call comes next, so the step that reports one need not have made it."""
    if is_out_of_memory(error) or _launch_status(error) in REFUSED_LAUNCHES:
        return False
    if isinstance(error, torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and ("CUDA error" in str(error) or "CUDA driver error" in str(error))
