"""Pictures (matplotlib, the optional extra `bench`). Data in, PNG out; nothing is measured here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.kv_simulator import SHARES, KvOutcome
from loadtest.lengths import UsageError

INK, QUIET = "#1f2430", "#8a8f9c"
COLORS = ("#2f6fde", "#d9482b", "#1f9d6b", "#8d5bd6", "#c98a06", "#0e97a7")
SHARE_COLORS = {
    "live": "#1f9d6b", "reserved": "#8fb8f0", "internal": "#e08a3c", "external": "#c93a3a", "remainder": "#d5d8de",
}  # fmt: skip
SHARE_LABELS = {
    "live": "live tokens", "reserved": "reserved for later tokens", "internal": "internal fragmentation",
    "external": "external fragmentation", "remainder": "free, too little for the next request",
}  # fmt: skip


def subplots(rows: int, columns: int, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes, without a display. Raises UsageError if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("Drawing needs matplotlib: pip install 'pagemill[bench]'.") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=9)
        axis.grid(True, color="#e6e8ec", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, dpi=130, facecolor="white")


def plot_kv_waste(outcomes: Sequence[KvOutcome], path: Path) -> None:
    """Shares of the pool per allocator, and beside them the batch each sustains."""
    figure, ((left, right),) = subplots(1, 2, 12, 0.75 * len(outcomes) + 1.9)
    names = [outcome.name for outcome in outcomes]
    starts = [0.0] * len(outcomes)
    for share in SHARES:
        values = [100 * outcome.shares.get(share, 0.0) for outcome in outcomes]
        bars = left.barh(names, values, left=starts, color=SHARE_COLORS[share], label=SHARE_LABELS[share], height=0.62)
        left.bar_label(
            bars, [f"{value:.0f}" if value >= 4 else "" for value in values], label_type="center", fontsize=9
        )
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    left.set_xlim(0, 100)
    left.set_xlabel("% of the KV pool, while requests wait for memory")
    left.invert_yaxis()
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    bars = right.barh(names, [outcome.batch for outcome in outcomes], color=COLORS[0], height=0.62)
    right.bar_label(bars, [f" {outcome.batch:.1f}" for outcome in outcomes], fontsize=9)
    right.set_xlabel("sequences running at once (mean over the same steps)")
    right.set_yticklabels([])
    right.invert_yaxis()
    save(figure, path)
