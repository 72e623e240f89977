"""Dashboards and alerts ask for metrics that the server has, under labels and buckets that exist. That Prometheus
answers them is test_prometheus's business."""

from __future__ import annotations

import re

import pytest
import yaml

from server import settings
from server.app import create_app
from server.metrics import Metrics
from tests.deploy import dashboards
from tests.deploy.tools import ROOT
from tests.server.stub_engine import StubEngine

KUBERNETES = ROOT / "deploy" / "kubernetes"


def exposed() -> str:
    """/metrics of a server that has a key and has had an error."""
    engine = StubEngine(ready=True)
    metrics: Metrics = create_app(settings.load({"api_key": "sk-test"}), engine).state.metrics
    metrics.model_loaded(engine.model_info)
    metrics.error(500)
    return metrics.render().decode()


TEXT = exposed()
SAMPLES = set(re.findall(r"^([a-z]\w*)[{ ]", TEXT, re.MULTILINE))


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_every_metric_of_a_dashboard_exists(name: str) -> None:
    asked = [expression for _, expression in dashboards.queries(name)] + dashboards.notes(name)
    assert len(asked) > 20
    for expression in asked:
        wanted = dashboards.metrics_of(expression)
        assert wanted
        assert wanted <= SAMPLES, wanted - SAMPLES
    for metric, label in dashboards.variables(name):
        assert metric in SAMPLES
        assert label == "instance"  # Prometheus adds it


@pytest.mark.parametrize("alert", dashboards.rules())
def test_every_metric_of_an_alert_exists(alert: str) -> None:
    expression = dashboards.rules()[alert]
    wanted = dashboards.metrics_of(expression)
    assert wanted <= SAMPLES, wanted - SAMPLES
    for bound in re.findall(r'(\w+_bucket)\{[^}]*le="([^"]+)"', expression):
        assert f'{bound[0]}{{le="{bound[1]}"}}' in TEXT


def test_the_alerts_that_were_promised_are_there() -> None:
    promised = "EngineDead", "EngineHung", "QueueGrowing", "KVPressure", "Preemptions", "ErrorRate", "TTFT", "Down"
    assert {f"Pagemill{name}" for name in promised} <= set(dashboards.rules())


def test_the_metrics_that_scale_exist() -> None:
    hpa = yaml.safe_load((KUBERNETES / "cpu/hpa.yaml").read_text("utf-8"))
    keda = yaml.safe_load((KUBERNETES / "keda.yaml").read_text("utf-8"))
    adapter = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text("utf-8"))
    name = hpa["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert name in SAMPLES
    assert name in keda["spec"]["triggers"][0]["metadata"]["query"]
    assert adapter["rules"]["custom"][0]["seriesQuery"].startswith(name + "{")


@pytest.mark.parametrize("name", dashboards.NAMES)
def test_panels_do_not_overlap_and_have_titles_and_units(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    titles: set[str] = set()
    for panel in dashboards.board(name)["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["title"] not in titles
        titles.add(panel["title"])
    assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in dashboards.panels(name))
