"""The real Prometheus with our configuration: it takes the files, scrapes a live server with the key, and answers
every query of every dashboard with numbers."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy import dashboards
from tests.deploy.tools import HOW, ROOT, TOOLS, find_tool, missing_tool
from tests.server.process import ServerProcess, free_port

CONFIG = ROOT / "config"
KEY = "sk-scrape"
FLAGS = ("--kv-cache-memory", "64MiB", "--max-model-len", "1024", "--num-threads", "1")


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    if reason := missing_tool("promtool"):
        pytest.skip(reason)
    return subprocess.run([str(find_tool("promtool")), *words], capture_output=True, text=True, timeout=120)


def test_promtool_takes_the_configuration() -> None:
    checked = promtool("check", "config", "--syntax-only", str(CONFIG / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", str(CONFIG / "alerts.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(dashboards.rules())} rules found" in checked.stdout


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    shutil.copy(CONFIG / "alerts.yml", tmp_path)
    file = tmp_path / "alerts_test.yml"
    shutil.copy(Path(__file__).with_name("alerts_test.yml"), file)
    checked = promtool("test", "rules", str(file))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert "SUCCESS" in checked.stdout
    told = file.read_text("utf-8")
    assert all(name in told for name in dashboards.rules()), "a rule without a test"


def test_grafanas_own_model_reads_the_dashboards() -> None:
    python = TOOLS / "python/bin/python"
    script = (
        "import json, sys; from grafana_foundation_sdk.models.dashboard import Dashboard\n"
        "board = Dashboard.from_json(json.load(sys.stdin)); print(board.uid, len(board.panels))"
    )
    if not python.exists():
        pytest.skip(f"grafana-foundation-sdk is not here: {HOW}")
    for name in dashboards.NAMES:
        board = dashboards.board(name)
        done = subprocess.run([str(python), "-c", script], input=json.dumps(board), capture_output=True, text=True)
        assert done.stdout.split() == [board["uid"], str(len(board["panels"]))], done.stderr


# -- live ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of Prometheus, which scrapes a server that has traffic."""
    if reason := missing_tool("prometheus"):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("prometheus")
    with contextlib.ExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "server", "serve", "--port", str(port), "--api-key", KEY, *FLAGS]
        server = ServerProcess(command, port, folder / "server.log")
        stack.callback(server.end)
        server.wait_for("ready", 300)
        stack.enter_context(traffic(server))
        url = stack.enter_context(scraping(folder, server))
        yield stack.enter_context(httpx.Client(base_url=url + "/api/v1", timeout=30, trust_env=False))


@contextlib.contextmanager
def scraping(folder: Path, server: ServerProcess) -> Iterator[str]:
    """The URL of a Prometheus that runs config/prometheus.yml: addresses and the key's place are this test's, it
    scrapes each second, and it has a second job with a wrong key."""
    listen = f"127.0.0.1:{free_port()}"
    config = yaml.safe_load((CONFIG / "prometheus.yml").read_text("utf-8"))
    config["global"] |= {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "2s"}
    ours, itself = config["scrape_configs"]
    (folder / "key").write_text(KEY)
    (folder / "wrong").write_text("sk-wrong")
    ours["authorization"]["credentials_file"] = str(folder / "key")
    ours["static_configs"] = [{"targets": [f"127.0.0.1:{server.port}"]}]
    itself["static_configs"] = [{"targets": [listen]}]
    wrong = {**ours, "job_name": "wrong", "authorization": {"credentials_file": str(folder / "wrong")}}
    config["scrape_configs"].append(wrong)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(CONFIG / "alerts.yml", folder)
    checked = promtool("check", "config", str(folder / "prometheus.yml"))
    assert checked.returncode == 0, checked.stdout + checked.stderr
    words = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command = [str(find_tool("prometheus")), *words, f"--web.listen-address={listen}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_listening(f"http://{listen}", folder / "prometheus.log")
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(30)


def _wait_listening(url: str, log: Path) -> None:
    for _ in range(300):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url + "/-/ready", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"Prometheus does not start:\n{log.read_text()[-2000:]}")


@contextlib.contextmanager
def traffic(server: ServerProcess) -> Iterator[None]:
    """Every kind of request that a panel counts, again and again, one at a time."""
    ended = threading.Event()

    def run() -> None:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=server.url, timeout=60, trust_env=False, headers=headers) as client:
            for turn in itertools.count():
                if ended.is_set():
                    return
                _requests(client, turn)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _requests(client: httpx.Client, turn: int) -> None:
    prompt = "The following is a list of cities and the countries in which they lie. " * 2
    body = {"prompt": f"{prompt}{turn}:", "max_tokens": 6, "temperature": 0}
    assert client.post("/v1/completions", json=body).status_code == 200
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400
    schema = {"type": "object", "properties": {f"a{turn}": {"type": "boolean"}}, "required": [f"a{turn}"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}}}
    asked = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 12, "response_format": form}
    assert client.post("/v1/chat/completions", json=asked).status_code == 200
    with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 200, "stream": True}) as answer:
        next(answer.iter_lines())  # and leaves


def ask(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """The samples of an instant query that are numbers."""
    answer = client.get("/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    result: list[dict[str, Any]] = answer["data"]["result"]
    return [sample for sample in result if not math.isnan(float(sample["value"][1]))]


def until(client: httpx.Client, expressions: list[str], timeout_s: float = 120) -> list[str]:
    """Those that were not answered with a number within the time."""
    end = time.monotonic() + timeout_s
    while (left := [text for text in expressions if not ask(client, text)]) and time.monotonic() < end:
        time.sleep(1)
    return left


@pytest.mark.slow
@pytest.mark.model
def test_the_server_is_scraped_with_its_key_and_not_with_another(prometheus: httpx.Client) -> None:
    assert until(prometheus, ['up{job="pagemill"} == 1', 'up{job="wrong"} == 0']) == []
    targets = prometheus.get("/targets").json()["data"]["activeTargets"]
    errors = {target["labels"]["job"]: target["lastError"] for target in targets}
    assert errors["pagemill"] == ""
    assert "401" in errors["wrong"]


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize("name", dashboards.NAMES)
def test_every_query_of_the_dashboard_is_answered_with_numbers(prometheus: httpx.Client, name: str) -> None:
    asked = [dashboards.filled(expression, "20s") for _, expression in dashboards.queries(name)]
    assert until(prometheus, asked) == []
    for expression in dashboards.notes(name):
        ask(prometheus, dashboards.filled(expression, "20s"))
    for metric, label in dashboards.variables(name):
        values = prometheus.get(f"/label/{label}/values", params={"match[]": metric}).json()["data"]
        assert len(values) == 1  # one server, however many jobs ask it


@pytest.mark.slow
@pytest.mark.model
def test_every_alert_rule_is_evaluated_and_none_fires(prometheus: httpx.Client) -> None:
    end = time.monotonic() + 60
    while True:
        groups = prometheus.get("/rules").json()["data"]["groups"]
        rules = {rule["name"]: rule for group in groups for rule in group["rules"]}
        if rules and all(rule["health"] == "ok" for rule in rules.values()):
            break
        assert time.monotonic() < end, rules
        time.sleep(1)
    assert set(rules) == set(dashboards.rules())
    assert {name for name, rule in rules.items() if rule["state"] == "firing"} == set()
