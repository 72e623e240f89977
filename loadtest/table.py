"""A result as text for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

ROWS = (("TTFT", "ttft"), ("ITL", "itl"), ("TPOT", "tpot"), ("E2E", "e2e"))
COLUMNS = ("mean", "p50", "p90", "p99", "max")


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def result_table(result: Mapping[str, Any]) -> str:
    """Rates, latencies in milliseconds, errors, the server's own numbers, the client's own cost."""
    requests, rates, tokens = result["requests"], result["rates"], result["tokens"]
    lines = [
        f"{result.get('workload', 'load')} on {result.get('url', '?')} "
        f"({result.get('loop', '?')}, seed {result.get('seed')})",
        f"requests   {requests['completed']} of {requests['total']} completed in {result['duration_s']:.2f} s"
        + (f", {requests['short']} shorter than asked" if requests["short"] else ""),
        f"rates      {rates['requests_per_s']:.2f} requests/s, {rates['output_tokens_per_s']:.1f} output tok/s, "
        f"{rates['total_tokens_per_s']:.1f} total tok/s",
        f"tokens     {tokens['prompt']} prompt ({tokens['cached']} cached), {tokens['output']} output"
        + (f", {tokens['per_event']:.2f} per stream event" if tokens["per_event"] else ""),
    ]
    if "goodput" in result:
        goodput = result["goodput"]
        limits = ", ".join(f"{key} <= {limit * 1000:g} ms" for key, limit in goodput["objective_s"].items())
        lines.append(f"goodput    {goodput['requests_per_s']:.2f} requests/s ({goodput['share']:.0%}) with {limits}")
    lines += error_lines(result)
    lines += ["", latency_grid(result["latency_s"]), ""]
    return "\n".join([*lines, *_server_lines(result), *_client_lines(result)])


def error_lines(result: Mapping[str, Any]) -> list[str]:
    """One per kind, with what the server said about one of them."""
    examples = result.get("error_examples", {})
    return [
        f"error      {count} x {kind}" + (f", such as {examples[kind]}" if kind in examples else "")
        for kind, count in result["errors"].items()
    ]


def latency_grid(latency: Mapping[str, Any]) -> str:
    rows: list[list[str]] = [["ms", *COLUMNS, "count"]]
    for label, key in ROWS:
        values = latency[key]
        if values["count"]:
            cells = [f"{values[column] * 1000:.2f}" for column in COLUMNS]
            rows.append([label, *cells, str(values["count"])])
    return grid(rows)


def _server_lines(result: Mapping[str, Any]) -> list[str]:
    server, lines = result["server"], []
    if server.get("live_slot_utilization") is not None:
        minimum = server.get("live_slot_utilization_min")
        lines.append(
            f"server     live-slot utilisation {server['live_slot_utilization']:.2%}"
            + (f" (least of any step since start {minimum:.2%})" if minimum is not None else "")
        )
    if "kv_cache_usage_perc" in server:
        lines.append(f"           KV blocks in use at most {server['kv_cache_usage_perc']['max']:.1%}")
    if "rss_after_bytes" in server:
        sizes = [f"{server[f'rss_{when}_bytes'] / 2**20:.0f}" for when in ("before", "max", "after")]
        lines.append(f"           memory before / peak / after {' / '.join(sizes)} MiB")
    return lines


def _client_lines(result: Mapping[str, Any]) -> list[str]:
    client, machine = result["client"], result["machine"]
    lag = result["latency_s"]["send_lag"]
    per_token = f"{client['cpu_us_per_token']:.1f} us" if client["cpu_us_per_token"] is not None else "-"
    lines = [
        f"client     {per_token} of CPU per token, {client['share_of_core']:.1%} of one core, "
        f"requests left {lag.get('p99', 0.0) * 1000:.2f} ms late (p99)",
        f"machine    load before {machine['load_before']:.2f}, cores busy {machine['cores_busy']:.2f}"
        + (f", of these others {machine['cores_others']:.2f}" if "cores_others" in machine else ""),
    ]
    if client["saturated"]:
        lines.append("WARNING    the client used most of a core: it may have measured itself")
    return lines
