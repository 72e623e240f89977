"""`loadtest report`: result files -> one HTML file that needs no other host, and the same pictures as PNGs."""

from __future__ import annotations

import argparse
import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.cli_compare import comparison_table
from loadtest.kv_simulator import KvOutcome
from loadtest.lengths import UsageError
from loadtest.plots import (
    label_of,
    plot_comparison,
    plot_kv_waste,
    plot_latencies,
    plot_ratios,
    plot_series,
    plot_sweep,
)
from loadtest.sweep import sweep_table
from loadtest.table import result_table

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2430; max-width: 1100px; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem }
pre { background: #f5f6f8; padding: .8rem 1rem; overflow-x: auto; font-size: 13px; border-radius: 6px }
img { max-width: 100%; height: auto } .quiet { color: #6a6f7c }
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("report", help="HTML and PNGs from result files", allow_abbrev=False)
    parser.add_argument("results", nargs="+", type=Path, help="JSON of run, sweep, compare, soak, kv_waste, ratio")
    parser.add_argument("--out", type=Path, default=Path("loadtest-report"), help="folder to write to")
    parser.add_argument("--title", default="Load test")
    parser.set_defaults(command=command)


async def command(arguments: argparse.Namespace) -> int:
    """Always exit code 0, unless a file cannot be read."""
    arguments.out.mkdir(parents=True, exist_ok=True)
    sections = []
    for path in arguments.results:
        sections += make_sections(read_result(path), path.stem, arguments.out)
    page = arguments.out / "index.html"
    page.write_text(make_page(arguments.title, sections))
    print(page)
    return 0


class Section:
    """A heading, a table as text, and pictures (PNG files)."""

    def __init__(self, title: str, text: str, pictures: Sequence[Path]) -> None:
        self.title, self.text, self.pictures = title, text, pictures


def read_result(path: Path) -> Any:
    """Raises UsageError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"Cannot read the result {path}: {error}.") from None


def make_sections(result: Any, stem: str, out: Path) -> list[Section]:
    """Draws what the kind of result asks for. Raises UsageError on a file that is none of ours."""
    kind = "kv_waste" if isinstance(result, list) else result.get("kind")
    if kind == "run":
        return [run_section(result, stem, out)]
    if kind == "sweep":
        picture = out / f"{stem}-curve.png"
        plot_sweep(result, picture)
        return [Section(f"Sweep of {result['workload']}", sweep_table(result), [picture])]
    if kind == "compare":
        picture = out / f"{stem}-servers.png"
        plot_comparison(result, picture)
        return [Section("Servers compared", comparison_table(result), [picture])]
    if kind == "soak":
        picture = out / f"{stem}-series.png"
        text = "\n".join([json.dumps(result["tally"], indent=1), *(result["faults"] or ["no faults"])])
        return [Section("Soak", text, [picture] if plot_series(result, picture) else [])]
    if kind == "ratio":
        picture = out / f"{stem}-ratios.png"
        plot_ratios(result, picture)
        return [Section("Served beside plain generate", result["table"], [picture])]
    if kind == "kv_waste":
        picture = out / f"{stem}-shares.png"
        plot_kv_waste([KvOutcome(**row) for row in result], picture)
        return [Section("Where KV memory goes", "", [picture])]
    raise UsageError(f"{stem} is no result of loadtest.")


def run_section(result: Mapping[str, Any], stem: str, out: Path) -> Section:
    pictures = []
    if result.get("records"):
        pictures.append(out / f"{stem}-latency.png")
        plot_latencies([result], pictures[-1])
    series = out / f"{stem}-series.png"
    if plot_series(result, series):
        pictures.append(series)
    return Section(label_of(result), result_table(result), pictures)


def make_page(title: str, sections: Sequence[Section]) -> str:
    """The pictures are in the page itself."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"]
    parts.append(f"<style>{STYLE}</style><h1>{html.escape(title)}</h1>")
    for section in sections:
        parts.append(f"<h2>{html.escape(section.title)}</h2>")
        for picture in section.pictures:
            data = base64.b64encode(picture.read_bytes()).decode()
            parts.append(f'<p><img alt="{html.escape(picture.stem)}" src="data:image/png;base64,{data}"></p>')
        if section.text:
            parts.append(f"<pre>{html.escape(section.text)}</pre>")
    parts.append("<p class=quiet>Definitions: docs/loadtest.md.</p></html>")
    return "\n".join(parts)
