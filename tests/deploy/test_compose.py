"""docker-compose.yml and what it mounts, as far as that can be known without Docker: the published schema, files that
exist, settings and metrics that exist, names that agree across the files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.settings import ENV_PREFIX, Settings
from tests.deploy.dockerfile import parse
from tests.deploy.tools import HOW, ROOT, TOOLS

FILES = ("docker-compose.yml", "deploy/compose.cuda.yml", "deploy/compose.keys.yml")
MADE = ("./keys.toml",)  # by whoever follows docs/operations.md


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text("utf-8"))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = read("docker-compose.yml")["services"]
    return found


def problem(text: str) -> str:
    """What the reader of the compose specification says, with variables filled in; empty: nothing."""
    python = TOOLS / "python/bin/python"
    if not python.exists():
        pytest.skip(f"compose-spec is not here: {HOW}")
    filled = re.sub(r"\$\{\w+:([-?])([^}]*)\}", lambda match: match[2] if match[1] == "-" else "given", text)
    script = "import sys, compose_spec; compose_spec.PyCompose.from_yaml(sys.stdin.read()).validate()"
    done = subprocess.run([str(python), "-c", script], input=filled, capture_output=True, text=True)
    return done.stderr.strip().rpartition("\n")[2]


@pytest.mark.parametrize("name", FILES)
def test_it_is_what_the_compose_specification_allows(name: str) -> None:
    assert problem((ROOT / name).read_text("utf-8")) == ""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("read_only: true", "read_onyl: true"),
        ("restart: unless-stopped", "restart: often"),
        ("[pagemill_key]", "[other]"),
    ],
)
def test_the_reader_would_notice_a_mistake(right: str, wrong: str) -> None:
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    assert right in text
    assert problem(text.replace(right, wrong)).startswith("ValueError")


@pytest.mark.parametrize("name", FILES)
def test_what_is_mounted_exists(name: str) -> None:
    for service in read(name)["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source in MADE:
                assert source.removeprefix("./") in (ROOT / "docs" / "operations.md").read_text("utf-8")
            elif source.startswith("./"):
                assert (ROOT / source).exists(), source
            elif not source.startswith("$"):
                assert source in read("docker-compose.yml")["volumes"], source


@pytest.mark.parametrize("name", FILES[:2])
def test_what_is_built_are_targets_of_the_dockerfile(name: str) -> None:
    targets = {stage.name for stage in parse(ROOT / "Dockerfile").stages}
    server = read(name)["services"]["server"]
    assert server["build"]["target"] in targets
    assert server["image"] == f"pagemill:{server['build']['target']}"
    arguments = {
        i.rest.partition("=")[0] for s in parse(ROOT / "Dockerfile").stages for i in s.instructions if i.word == "ARG"
    }
    assert set(server["build"].get("args", ())) <= arguments


def test_the_index_of_cpu_builds_is_not_handed_to_the_image_for_gpus() -> None:
    """Compose joins the files' arguments by name: what the second does not name is the first's."""
    given = [read(name)["services"]["server"]["build"]["args"] for name in FILES[:2]]
    assert given[0].keys() == given[1].keys()
    values = [set(arguments.values()) for arguments in given]
    assert values == [{"${TORCH_ARGS:-}"}, {"${TORCH_CUDA_ARGS:-}"}]


@pytest.mark.parametrize("file", FILES)
def test_what_the_server_is_told_are_settings(file: str) -> None:
    for name in read(file)["services"]["server"].get("environment", ()):
        if name.startswith(ENV_PREFIX):
            assert name.removeprefix(ENV_PREFIX).lower() in Settings.model_fields


def test_nothing_is_open_to_other_machines_and_secrets_have_no_defaults(services: dict[str, Any]) -> None:
    for service in services.values():
        for port in service["ports"]:
            assert port.startswith("127.0.0.1:")
    text = (ROOT / "docker-compose.yml").read_text("utf-8")
    for name in ("PAGEMILL_API_KEY", "GRAFANA_PASSWORD"):
        assert re.search(rf"\$\{{{name}:\?[^}}]+\}}", text), f"{name} must be asked for"


def test_the_server_is_locked_down_and_has_time_to_drain(services: dict[str, Any]) -> None:
    server = services["server"]
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    grace_s = int(server["stop_grace_period"].removesuffix("s"))
    assert grace_s > Settings.model_fields["grace_period"].default


def test_images_of_others_are_pinned(services: dict[str, Any]) -> None:
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"])


def test_prometheus_asks_the_server_with_its_key(services: dict[str, Any]) -> None:
    jobs = {job["job_name"]: job for job in read("config/prometheus.yml")["scrape_configs"]}
    job = jobs["pagemill"]
    (target,) = job["static_configs"][0]["targets"]
    name, _, port = target.partition(":")
    assert name in services
    assert services["server"]["ports"] == [f"127.0.0.1:{port}:{port}"]
    (secret,) = services["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert read("docker-compose.yml")["secrets"][secret] == {"environment": "PAGEMILL_API_KEY"}


def test_grafana_finds_prometheus_and_its_dashboards(services: dict[str, Any]) -> None:
    mounts = dict(volume.split(":")[:2][::-1] for volume in services["grafana"]["volumes"])
    (provider,) = read("config/grafana/provisioning/dashboards/pagemill.yml")["providers"]
    folder = ROOT / mounts[provider["options"]["path"]]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (folder / Path(home).name).is_file()
    (source,) = read("config/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    host, port = source["url"].removeprefix("http://").split(":")
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    for path in folder.glob("*.json"):
        board = json.loads(path.read_text("utf-8"))
        used = {panel["datasource"]["uid"] for panel in board["panels"] if "datasource" in panel}
        assert used == {source["uid"]}
