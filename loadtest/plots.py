"""Pictures (matplotlib, the optional extra `bench`). Data in, PNG out; nothing is measured here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
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


def plot_sweep(result: Mapping[str, Any], path: Path) -> None:
    """The throughput-latency curve: TTFT, TPOT and E2E over the completed rate, the knee marked."""
    points = [point for point in result["points"] if point["requests"]["completed"]]
    figure, axes = subplots(1, 3, 13, 3.9)
    rates = [point["rates"]["output_tokens_per_s"] for point in points]
    for axis, (key, title) in zip(axes.flat, (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")), strict=True):
        for percent, color in zip(("p50", "p90", "p99"), COLORS, strict=False):
            latencies = [1000 * point["latency_s"][key].get(percent, float("nan")) for point in points]
            axis.plot(rates, latencies, "o-", color=color, label=percent, markersize=4)
        axis.set_title(f"{title}, ms", loc="left", fontsize=10, color=INK)
        axis.set_xlabel("output tokens/s")
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        for rate, point in zip(rates, points, strict=True):
            if point["rate"] == result["knee"]["rate"]:
                axis.axvline(rate, color=QUIET, linestyle="--", linewidth=1)
                where = {"xycoords": ("data", "axes fraction"), "va": "top"}
                axis.annotate(" knee", (rate, 0.97), color=QUIET, fontsize=9, **where)
    axes.flat[0].legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_latencies(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Histograms of TTFT, ITL, TPOT and E2E of one or more runs (their results hold records)."""
    figure, axes = subplots(1, 4, 14, 3.6)
    columns = (("ttft_s", "TTFT"), ("itl_s", "ITL"), ("tpot_s", "TPOT"), ("e2e_s", "E2E"))
    for axis, (key, title) in zip(axes.flat, columns, strict=True):
        for result, color in zip(results, COLORS, strict=False):
            values = sorted(1000 * value for record in result["records"] for value in _values(record[key]))
            if not values:
                continue
            end = values[min(len(values) - 1, int(0.995 * len(values)))]  # the rest is in the table
            shown = [value for value in values if value <= end]
            axis.hist(shown, bins=40, color=color, alpha=0.75 if len(results) == 1 else 0.5, label=label_of(result))
        axis.set_title(f"{title}, ms", loc="left", fontsize=10, color=INK)
    if len(results) > 1:
        axes.flat[0].legend(frameon=False, fontsize=9)
    save(figure, path)


def plot_series(result: Mapping[str, Any], path: Path) -> bool:
    """What /metrics said during the run: KV utilisation, batch size and queue, memory. False if it said nothing."""
    samples = result.get("series", [])
    panels: list[tuple[str, tuple[tuple[str, float, str], ...]]] = [
        ("KV blocks in use, %", (("kv_cache_usage_perc", 100.0, ""),)),
        ("sequences", (("num_requests_running", 1.0, "running"), ("num_requests_waiting", 1.0, "waiting"))),
        ("memory of the server, MiB", (("rss_bytes", 2.0**-20, ""),)),
    ]
    panels = [panel for panel in panels if any(key in sample for key, _, _ in panel[1] for sample in samples)]
    if not panels:
        return False
    figure, axes = subplots(len(panels), 1, 11, 1.9 * len(panels) + 0.5)
    for axis, (title, lines) in zip(axes.flat, panels, strict=True):
        for (key, scale, label), color in zip(lines, COLORS, strict=False):
            pairs = [(sample["t"], scale * sample[key]) for sample in samples if key in sample]
            axis.plot([x for x, _ in pairs], [y for _, y in pairs], color=color, label=label, linewidth=1.4)
        axis.set_title(title, loc="left", fontsize=10, color=INK)
        axis.set_ylim(bottom=0)
        if len(lines) > 1:
            axis.legend(frameon=False, fontsize=9)
    axes.flat[-1].set_xlabel("seconds since the start of the run")
    save(figure, path)
    return True


def plot_comparison(result: Mapping[str, Any], path: Path) -> None:
    """Output tokens per second: the median over rounds, the least and greatest as whiskers."""
    rows = [row for row in result["ratios"] if row["metric"] == "output_tokens_per_s"]
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    servers = list(dict.fromkeys(row["server"] for row in rows))
    figure, axes = subplots(1, len(workloads), 2.6 * len(workloads) + 1, 3.6)
    for axis, workload in zip(axes.flat, workloads, strict=True):
        for position, server in enumerate(servers):
            for row in rows:
                if (row["workload"], row["server"]) == (workload, server):
                    values = [value for value in row["values"] if value is not None]
                    middle = median(values)
                    spread = [[middle - min(values)], [max(values) - middle]]
                    color = COLORS[position % len(COLORS)]
                    axis.bar([position], [middle], yerr=spread, color=color, width=0.7, capsize=3, label=server)
        axis.set_title(workload, loc="left", fontsize=10, color=INK)
        axis.set_xticks(range(len(servers)), servers, rotation=30, ha="right")
    axes.flat[0].set_ylabel("output tokens/s")
    save(figure, path)


def label_of(result: Mapping[str, Any]) -> str:
    return f"{result.get('workload', 'run')} ({result.get('loop', '')})"


def _values(value: Any) -> list[float]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def plot_ratios(result: Mapping[str, Any], path: Path) -> None:
    """Served over generate, useful output tokens per second, beside the ratios the paper's article claims."""
    points = result["points"]
    figure, ((left, right),) = subplots(1, 2, 12, 4.2)
    for position, lengths in enumerate(dict.fromkeys(point["lengths"] for point in points)):
        mine = [point for point in points if point["lengths"] == lengths]
        color, where = COLORS[position % len(COLORS)], [point["concurrency"] for point in mine]
        left.plot(
            where, [point["served_tokens_per_s"] for point in mine], "o-", color=color, label=f"served, {lengths}"
        )
        left.plot(where, [point["generate_tokens_per_s"] for point in mine], "o:", color=color, label="generate, same")
        right.plot(where, [point["ratio"] for point in mine], "o-", color=color, label=lengths)
    right.axhspan(2, 4, color="#e6e8ec", zorder=0)
    right.axhline(24, color=QUIET, linestyle="--", linewidth=1)
    for height, text in ((2.1, "2-4x"), (24.3, "up to 24x")):
        right.annotate(text, (0.01, height), xycoords=("axes fraction", "data"), color=QUIET, fontsize=9)
    for axis, title in ((left, "useful output tokens/s"), (right, "served / generate")):
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
        axis.set_xlabel("concurrency")
        axis.set_title(title, loc="left", fontsize=10, color=INK)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    save(figure, path)
