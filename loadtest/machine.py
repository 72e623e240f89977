"""What the machine does beside us, read from /proc (Linux; elsewhere the answers are empty or zero)."""

from __future__ import annotations

import asyncio
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
TICK = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
PROC = Path("/proc")
LOOK_S = 1.0


def process_tree(pid: int) -> list[int]:
    """pid and its living descendants."""
    children: dict[int, list[int]] = {}
    for entry in PROC.glob("[0-9]*/stat"):
        fields = _stat(int(entry.parent.name))
        if fields:
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    tree = [pid]
    for each in tree:
        tree += children.get(each, ())
    return tree


def resident_bytes(pid: int) -> int:
    """Resident memory of pid and its descendants (pages shared between them count more than once)."""
    total = 0
    for each in process_tree(pid):
        try:
            total += int((PROC / str(each) / "statm").read_text().split()[1]) * PAGE
        except (OSError, IndexError):
            continue
    return total


def cpu_seconds(pid: int) -> float:
    """User and system time of pid and its living descendants, with what their dead children used."""
    total = 0
    for each in process_tree(pid):
        fields = _stat(each)
        if fields:
            total += sum(int(field) for field in fields[11:15])
    return total / TICK


def open_handles(pid: int) -> tuple[int, int]:
    """Files (sockets among them) that pid and its descendants hold open, and how many of them are sockets."""
    links: list[str] = []
    for each in process_tree(pid):
        with suppress(OSError):  # the process is gone
            links += [_link(entry) for entry in (PROC / str(each) / "fd").iterdir()]
    return len(links), sum(link.startswith("socket:") for link in links)


def threads(pid: int) -> int:
    return sum(int(fields[17]) for each in process_tree(pid) if (fields := _stat(each)))


def _link(entry: Path) -> str:
    try:
        return os.readlink(entry)
    except OSError:  # closed meanwhile
        return ""


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name: [0] state, [1] parent, [11:15] times in ticks, [17] threads."""
    try:
        return (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


@dataclass(frozen=True, slots=True)
class CpuMark:
    """busy_s: CPU seconds of the whole machine since boot, idle and waiting for disks excluded."""

    moment_s: float
    busy_s: float

    @classmethod
    def now(cls) -> CpuMark:
        try:
            fields = [int(field) for field in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return cls(perf_counter(), 0.0)
        return cls(perf_counter(), (sum(fields) - fields[3] - fields[4]) / TICK)

    def cores_since(self, earlier: CpuMark) -> float:
        """Cores busy on average between the two marks."""
        elapsed = self.moment_s - earlier.moment_s
        return (self.busy_s - earlier.busy_s) / elapsed if elapsed > 0 else 0.0


def load_average() -> float:
    """Of the last minute."""
    return os.getloadavg()[0]


async def look_around() -> dict[str, float]:
    """What the machine does before we do anything: the load of the last minute, the cores busy in the next second."""
    load, mark = load_average(), CpuMark.now()
    await asyncio.sleep(LOOK_S)
    return {"load": load, "cores_busy": CpuMark.now().cores_since(mark)}


def describe_machine() -> dict[str, object]:
    names = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": int(memory[0]) * 1024 if memory else None,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
