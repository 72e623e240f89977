"""Result lines of tests/gpu/run.sh: written at once, one JSON object a line, and made a table at the end.

    python -m tests.gpu.results FOLDER            the table of FOLDER/results.jsonl

Imports nothing but the standard library, so that the table comes out whatever else is broken.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FILE = "results.jsonl"
COLUMNS = ("what", "measured", "share", "aim", "")


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement, or one fact.

    share: of what `of` names, 1.0 for all of it. aim: what the share, or without one the value, should reach at least.
    """

    stage: str
    what: str
    value: float | str
    unit: str = ""
    share: float | None = None
    of: str = ""
    aim: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """None where nothing was aimed at."""
        reached = self.value if self.share is None else self.share
        return None if self.aim is None or isinstance(reached, str) else reached >= self.aim

    def cells(self) -> list[str]:
        """One per column."""
        link = " " if self.of.startswith("x ") else " of "
        share = "" if self.share is None else _share(self.share, self.of) + link + self.of.removeprefix("x ")
        aim = "" if self.aim is None else (_number(self.aim) if self.share is None else _share(self.aim, self.of))
        verdict = {None: "", True: "met", False: "MISSED"}[self.is_met]
        measured = f"{_number(self.value)} {self.unit}".strip()
        return [self.what, measured, share, aim, "; ".join(filter(None, (verdict, self.note)))]


class Results:
    """The folder that the lines of one run go to."""

    def __init__(self, folder: Path, stage: str) -> None:
        self.folder, self.stage = folder, stage
        folder.mkdir(parents=True, exist_ok=True)

    def tell(self, what: str, value: float | str, unit: str = "", **more: Any) -> None:
        """Write a Line of this stage, now: to the file, and to stdout as text."""
        line = Line(self.stage, what, value, unit, **more)
        with (self.folder / FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(line)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print("  ".join(filter(None, line.cells())), flush=True)

    def value(self, what: str, otherwise: float) -> float:
        """The newest number told under this name, by whatever stage; `otherwise` without one."""
        found = [line.value for line in read(self.folder)[0] if line.what == what]
        return next((value for value in reversed(found) if not isinstance(value, str)), otherwise)


def read(folder: Path) -> tuple[list[Line], list[dict[str, Any]]]:
    """(result lines, what run.sh says of its stages) of a folder; half a last line, cut off by a kill, is left out."""
    lines: list[Line] = []
    stages: list[dict[str, Any]] = []
    path = folder / FILE
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(text)
        except ValueError:
            continue
        if "status" in row:
            stages.append(row)
        else:
            lines.append(Line(**row))
    return lines, stages


def table(lines: Sequence[Line], stages: Sequence[dict[str, Any]]) -> str:
    """Markdown: the measurements, then the stages and how each ended."""
    text = _grid([list(COLUMNS), *(line.cells() for line in lines)])
    ends = [["stage ended", "how", "seconds"]]
    ends += [[str(stage["stage"]), str(stage["status"]), str(stage["seconds"])] for stage in stages]
    aims = [line.is_met for line in lines if line.is_met is not None]
    return f"{text}\n\n{_grid(ends)}\n\naims met: {sum(aims)} of {len(aims)}"


def _grid(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    widths[-1] = 0  # the last column is ragged
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in padded]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _share(share: float, of: str) -> str:
    """A part of something as per cent, a multiple of it as a factor."""
    return f"{share:.2f} x" if of.startswith("x ") else f"{share:.0%}"


def _number(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if not math.isfinite(value):
        return "none"  # of what nothing was seen: gaps between tokens that came together
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.4g}"


if __name__ == "__main__":
    print(table(*read(Path(sys.argv[1]))))
