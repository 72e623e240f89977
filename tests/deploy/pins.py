"""What deploy/requirements.txt has to hold: the dependencies of the server and of its extra otel, theirs, and so on,
but for torch itself, in the versions of this environment. `python -m tests.deploy.pins` writes the file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FILE = ROOT / "deploy" / "requirements.txt"
EXTRA = "otel"  # 6 MB; an image cannot be added to, for it has no pip
LEFT_OUT = "torch"  # its build depends on the image


def direct() -> list[Requirement]:
    """The dependencies that pyproject.toml names, with those of the extra that the images have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"][EXTRA]]]


def closure() -> dict[str, str]:
    """Name -> installed version of everything that `pip install pagemill` would bring here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    waiting = direct()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), tuple(sorted(requirement.extras))
        if (name, extras) not in seen:
            seen.add((name, extras))
            found[name] = distribution(name).version
            waiting += _needed(name, extras)
    found.pop(LEFT_OUT)
    return dict(sorted(found.items()))


def _needed(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    for text in distribution(name).requires or ():
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def pinned() -> dict[str, str]:
    """Name -> version, as the file has them."""
    lines = [line for line in FILE.read_text("utf-8").splitlines() if line and not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def main() -> None:
    head = [line for line in FILE.read_text("utf-8").splitlines() if line.startswith("#")]
    FILE.write_text("\n".join([*head, *(f"{name}=={version}" for name, version in closure().items())]) + "\n", "utf-8")


if __name__ == "__main__":
    main()
