"""The queries of the dashboards and alert rules, and how Grafana would send them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import yaml

from tests.deploy.tools import ROOT

FOLDER = ROOT / "config" / "grafana" / "dashboards"
NAMES = sorted(path.name for path in FOLDER.glob("*.json"))
_METRIC = re.compile(r"\b(?:pagemill|process)_\w+")


def board(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((FOLDER / name).read_text("utf-8"))
    return read


def panels(name: str) -> Iterator[dict[str, Any]]:
    """Those that ask something."""
    for panel in board(name)["panels"]:
        if panel["type"] != "row":
            yield panel


def queries(name: str) -> list[tuple[str, str]]:
    """(panel's title, expression with Grafana's variables)."""
    return [(panel["title"], target["expr"]) for panel in panels(name) for target in panel["targets"]]


def notes(name: str) -> list[str]:
    """What its annotations ask."""
    return [note["expr"] for note in board(name)["annotations"]["list"] if "expr" in note]


def filled(expression: str, rate_interval: str) -> str:
    """With the variables' values: every server."""
    text = expression.replace("$__rate_interval", rate_interval).replace("$instance", ".*")
    assert "$" not in text, f"a variable that nobody fills: {text}"
    return text


def variables(name: str) -> list[tuple[str, str]]:
    """(metric, label) of each label_values(metric, label) variable."""
    texts = [variable["query"]["query"] for variable in board(name)["templating"]["list"]]
    found = [re.fullmatch(r"label_values\((\w+), (\w+)\)", text) for text in texts]
    return [(match[1], match[2]) for match in found if match]


def rules() -> dict[str, str]:
    """Alert -> expression."""
    groups = yaml.safe_load((ROOT / "config" / "alerts.yml").read_text("utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def metrics_of(expression: str) -> set[str]:
    return set(_METRIC.findall(expression))
