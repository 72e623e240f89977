"""The check of what ptxas says, on text as it says it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.emulation.build import ROOT

SPEC = importlib.util.spec_from_file_location("check_registers", ROOT / "csrc" / "cuda" / "check_registers.py")
assert SPEC is not None
assert SPEC.loader is not None
check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check)

NAME = "_ZN8pagemill4cuda68_GLOBAL__N__5c1f6d0a_7_norm_cu_10cc7c6e_29_pagemill_rms_norm_of_rows13norm_by_blockI{}EEvv"
NAME = NAME.replace(
    "68_GLOBAL", f"{len('_GLOBAL__N__5c1f6d0a_7_norm_cu_10cc7c6e_29_pagemill_rms_norm_of_rows')}_GLOBAL"
)
LOG = """ptxas info    : Compiling entry function '{name}' for 'sm_80'
ptxas info    : Function properties for {name}
    {stack} bytes stack frame, {stack} bytes spill stores, {stack} bytes spill loads
ptxas info    : Used {used} registers, used 1 barriers, 448 bytes cmem[0]
"""


@pytest.mark.parametrize(
    ("used", "stack", "table", "complaint"),
    [
        (40, 0, {"norm_by_block": 40}, None),
        (41, 0, {"norm_by_block": 40}, "norm_by_block (sm_80): 41 registers, the table has 40"),
        (40, 8, {"norm_by_block": 40}, "norm_by_block (sm_80): spills, 8 bytes spill stores, 8 bytes spill loads"),
        (40, 0, {}, "norm_by_block: not in registers.toml"),
        (40, 0, {"norm_by_block": 40, "gone": 8}, "gone: in registers.toml, but there is no such kernel"),
    ],
)
def test_complaints(used: int, stack: int, table: dict[str, int], complaint: str | None) -> None:
    log = LOG.format(name=NAME.format("f"), used=used, stack=stack)
    assert check.complaints(log, table) == ([complaint] if complaint else [])


def test_every_kernel_is_in_the_table() -> None:
    """As far as the sources tell; the compiler's log tells the rest."""
    sources = [path.read_text() for path in sorted(Path(check.TABLE.parent).glob("*.cu*"))]
    kernels = {
        name
        for text in sources
        for name in re.findall(r"__global__ void (?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(", text)
    }
    assert kernels == set(check.tomllib.loads(check.TABLE.read_text())["registers"])
