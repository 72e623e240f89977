"""How much memory this process may still take. Reads /proc and the control groups, nothing else."""

from __future__ import annotations

from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NO_PROC = 8 << 30  # where the machine does not say (macOS): a careful guess, overridden by --kv-cache-memory


def available_memory() -> int:
    """Bytes: the machine's available memory, cut by the limits of the control groups around this process."""
    limited = cgroup_available(CGROUPS, own_cgroup(Path("/proc/self/cgroup")))
    available = _meminfo_available()
    return available if limited is None else min(available, limited)


def own_cgroup(listing: Path) -> str:
    """This process's path below the mount of control groups, version 2; "" where there is none."""
    try:
        lines = listing.read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:].strip("/") for line in lines if line.startswith("0::")), "")


def cgroup_available(mount: Path, own: str = "") -> int | None:
    """Bytes below the tightest limit from `mount`/`own` up to `mount` (version 2), or of version 1's memory group
    at `mount`; None without a limit.

    Page cache that the kernel can drop counts as free, as kubelet and docker stats count it: reading the model's own
    files fills it up to the limit."""
    group = mount / own
    found = []
    while True:
        found.append(_below_limit(group, "memory.max", "memory.current", "inactive_file"))
        if group == mount:
            break
        group = group.parent
    found.append(
        _below_limit(mount / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    return min((value for value in found if value is not None), default=None)


def size_text(num_bytes: int) -> str:
    """1536 -> "1.5 KiB"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"


def _below_limit(group: Path, limit_file: str, usage_file: str, droppable: str) -> int | None:
    limit, usage = _read_int(group / limit_file), _read_int(group / usage_file)
    if limit is None or usage is None:
        return None
    return max(0, limit - max(0, usage - _read_stat(group / "memory.stat", droppable)))


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return NO_PROC


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _read_stat(path: Path, name: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(name + " ")), 0)
