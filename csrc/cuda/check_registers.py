"""Reads what ptxas said (-Xptxas -v) and holds every kernel to registers.toml; any spill is an error.

python csrc/cuda/check_registers.py ptxas.log
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

TABLE = Path(__file__).with_name("registers.toml")
ENTRY = re.compile(r"Compiling entry function '(\w+)' for '(\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers")


def kernel_name(mangled: str) -> str:
    """The innermost name of a mangled function: _ZN8pagemill4cuda...13norm_by_blockI...E to norm_by_block."""
    rest, name = mangled.removeprefix("_ZN").removeprefix("_Z"), ""
    while (length := re.match(r"\d+", rest)) is not None:
        end = length.end() + int(length.group())
        name, rest = rest[length.end() : end], rest[end:]
    return name or mangled


def complaints(log: str, table: dict[str, int]) -> list[str]:
    """One line per kernel and target that is not as the table wants it, and per entry without a kernel."""
    found: list[str] = []
    seen: set[str] = set()
    name = target = ""
    for line in log.splitlines():
        if entry := ENTRY.search(line):
            name, target = kernel_name(entry[1]), entry[2]
            seen.add(name)
            if name not in table:
                found.append(f"{name}: not in {TABLE.name}")
        elif (spills := SPILLS.search(line)) and spills.groups() != ("0", "0"):
            found.append(f"{name} ({target}): spills, {spills[0]}")
        elif (used := USED.search(line)) and int(used[1]) > table.get(name, 255):
            found.append(f"{name} ({target}): {used[1]} registers, the table has {table[name]}")
    found += [f"{name}: in {TABLE.name}, but there is no such kernel" for name in table if name not in seen]
    return sorted(set(found))


def main() -> None:
    table = tomllib.loads(TABLE.read_text())["registers"]
    found = complaints(Path(sys.argv[1]).read_text(), table)
    print("\n".join(found) or f"{len(table)} kernels within their registers, no spills")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
