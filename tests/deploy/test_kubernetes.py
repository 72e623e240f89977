"""deploy/kubernetes against the published schemas, the server's own settings, and what its phases answer to probes.

InferencePool has no published schema that could be installed here: @kubernetes-models/gateway-api has the Gateway API
without its inference extension, and no package that has it was found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server import settings
from server.app import create_app
from tests.deploy.test_profiles import table
from tests.deploy.tools import HOW, ROOT, TOOLS
from tests.server.process import ServerProcess, stub_server
from tests.server.stub_engine import StubEngine

FOLDER = ROOT / "deploy" / "kubernetes"
NODE = TOOLS / "node/node_modules/@kubernetes-models"
CORE = ("cpu/config.yaml", "cpu/deployment.yaml", "cpu/service.yaml", "cpu/hpa.yaml")
CUSTOM = {"cpu/podmonitor.yaml": "prometheus-operator", "keda.yaml": "keda", "keda-vllm.yaml": "keda"}
VERSIONS = ("1.30", "1.34")  # the oldest with preStop's sleep on, and a later one
VALIDATE = """
import json, sys
import kubernetes_validate
document, version = json.load(sys.stdin)
kubernetes_validate.validate(document, version, strict=True)
"""


def read(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text("utf-8"))


def validate(document: Any, version: str) -> None:
    python = TOOLS / "python/bin/python"
    if not python.exists():
        pytest.skip(f"kubernetes-validate is not here: {HOW}")
    given = json.dumps([document, version])
    done = subprocess.run([str(python), "-W", "ignore", "-c", VALIDATE], input=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", CORE)
def test_kubernetes_own_schema_takes_it(name: str, version: str) -> None:
    validate(read(name), version)


def test_the_services_name_makes_no_settings() -> None:
    """A Service named pagemill would set PAGEMILL_PORT=tcp://... in each Pod."""
    assert read("cpu/service.yaml")["metadata"]["name"].upper() + "_" == settings.ENV_PREFIX
    assert read("cpu/deployment.yaml")["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_the_schema_would_notice_a_wrong_field() -> None:
    wrong = read("cpu/deployment.yaml")
    wrong["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(AssertionError, match="livenesProbe"):
        validate(wrong, VERSIONS[0])


@pytest.mark.parametrize("name", CUSTOM)
def test_the_operators_schema_takes_it(name: str) -> None:
    document = read(name)
    assert custom_problem(name, document) == ""
    field = "selector" if name == "cpu/podmonitor.yaml" else "triggers"
    assert field in custom_problem(name, {**document, "spec": {**document["spec"], field: 3}})


def custom_problem(name: str, document: Any) -> str:
    """What the npm package that is generated from the operator's types says; empty: nothing."""
    package, kind = CUSTOM[name], document["kind"]
    if not (NODE / package).is_dir() or shutil.which("node") is None:
        pytest.skip(f"the schema of {kind} is not here: {HOW}")
    script = (
        f'import {{{kind}}} from "@kubernetes-models/{package}/{document["apiVersion"]}";'
        'import {readFileSync} from "fs";'
        f"try {{ new {kind}(JSON.parse(readFileSync(0))).validate() }} catch (error) {{ console.log(error.message) }}"
    )
    words = ["node", "--input-type=module", "-e", script]
    given = json.dumps(document)
    done = subprocess.run(words, cwd=TOOLS / "node", input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_kustomize_builds_it(folder: str) -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not here")
    built = subprocess.run([kubectl, "kustomize", str(FOLDER / folder)], capture_output=True, text=True, timeout=60)
    assert built.returncode == 0, built.stderr
    documents = {document["kind"]: document for document in yaml.safe_load_all(built.stdout)}
    assert set(documents) == {"ConfigMap", "Deployment", "Service", "HorizontalPodAutoscaler", "PodMonitor"}
    config = tomllib.loads(documents["ConfigMap"]["data"]["config.toml"])
    assert config == table("h200.toml" if folder == "cuda" else "cpu.toml") | {"log_format": "json"}
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"pagemill:{folder}"
    assert ("nvidia.com/gpu" in container["resources"]["limits"]) == (folder == "cuda")
    validate(documents["Deployment"], VERSIONS[0])


@pytest.mark.parametrize("folder", ["cpu", "cuda"])
def test_the_images_place_and_the_model_go_where_the_page_says(folder: str, tmp_path: Path) -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not here")
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    page = (ROOT / "docs" / "operations.md").read_text("utf-8")
    files = [f"{folder}/kustomization.yaml", f"{folder}/{'config' if folder == 'cpu' else 'kustomization'}.yaml"]
    for name, commented in zip(
        files, (r"^# (images:|  - \{name: pagemill, newName)", r"^( +)# (model = )"), strict=True
    ):
        assert f"`{name}`" in page
        text, changed = re.subn(commented, lambda m: "".join(m.groups()), (tmp_path / name).read_text(), flags=re.M)
        assert changed
        (tmp_path / name).write_text(text)
    words = [kubectl, "kustomize", str(tmp_path / folder)]
    built = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    documents = {document["kind"]: document for document in yaml.safe_load_all(built)}
    (container,) = documents["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"registry.example/pagemill:{folder}"
    assert tomllib.loads(documents["ConfigMap"]["data"]["config.toml"])["model"] == "owner/name"


def test_behind_a_gateway_the_pool_is_these_pods_and_the_picker_may_read_their_metrics() -> None:
    if (kubectl := shutil.which("kubectl")) is None:
        pytest.skip("kubectl is not here")
    words = [kubectl, "kustomize", str(FOLDER / "gateway")]
    built = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
    documents = {document["kind"]: document for document in yaml.safe_load_all(built)}
    for version in VERSIONS:
        validate(documents["Deployment"], version)
    pool, pod = documents["InferencePool"]["spec"], documents["Deployment"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert pool["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert pool["targetPorts"] == [{"number": container["ports"][0]["containerPort"]}]
    values = {variable["name"]: variable.get("value") for variable in container["env"]}
    given = {name.removeprefix(settings.ENV_PREFIX).lower(): value for name, value in values.items() if value}
    chosen = settings.load(given)
    assert not chosen.metrics_auth
    engine = StubEngine(ready=True)
    app = create_app(chosen, engine)
    app.state.metrics.model_loaded(engine.model_info)
    told = app.state.metrics.render().decode()
    for name in ("vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
        assert f"\n{name}{{" in told
    assert "vllm:num_requests_waiting{" in read("keda-vllm.yaml")["spec"]["triggers"][0]["metadata"]["query"]


def test_the_config_is_one_that_the_server_loads(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text(read("cpu/config.yaml")["data"]["config.toml"])
    assert settings.load({}, file).log_format == "json"


def test_names_agree() -> None:
    pod = read("cpu/deployment.yaml")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    (port,) = container["ports"]
    assert read("cpu/service.yaml")["spec"]["ports"][0]["targetPort"] == port["name"]
    assert read("cpu/podmonitor.yaml")["spec"]["podMetricsEndpoints"][0]["port"] == port["name"]
    for selector in (
        read("cpu/service.yaml")["spec"]["selector"],
        read("cpu/podmonitor.yaml")["spec"]["selector"]["matchLabels"],
    ):
        assert selector.items() <= pod["metadata"]["labels"].items()
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }
    for variable in container["env"]:
        assert variable["name"].removeprefix(settings.ENV_PREFIX).lower() in settings.Settings.model_fields
    for name in ("cpu/hpa.yaml", "keda.yaml", "keda-vllm.yaml"):
        assert read(name)["spec"]["scaleTargetRef"]["name"] == read("cpu/deployment.yaml")["metadata"]["name"]


def test_there_is_time_to_drain() -> None:
    pod = read("cpu/deployment.yaml")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    before_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > before_s + settings.Settings.model_fields["grace_period"].default + 3


# -- the probes, in each phase ------------------------------------------------------------------------------------


def probe(server: ServerProcess, name: str) -> bool:
    """What the kubelet would find."""
    (container,) = read("cpu/deployment.yaml")["spec"]["template"]["spec"]["containers"]
    path = container[name]["httpGet"]["path"]
    status = httpx.get(server.url + path, timeout=5, trust_env=False).status_code
    return 200 <= status < 400


def all_probes(server: ServerProcess) -> dict[str, bool]:
    return {name: probe(server, name) for name in ("startupProbe", "readinessProbe", "livenessProbe")}


def test_while_it_loads_only_startup_waits(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--load", "1.5") as server:
        server.wait_for("starting")
        assert not probe(server, "startupProbe")
        server.wait_for("ready")
        assert all_probes(server) == dict.fromkeys(all_probes(server), True)


def test_a_step_that_hangs_takes_it_out_and_has_it_restarted(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--hung") as server:
        server.wait_for("hung")
        assert not probe(server, "readinessProbe")
        assert not probe(server, "livenessProbe")


def test_a_server_that_drains_gets_no_new_work(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--interval", "0.02") as server:
        server.wait_for("ready")
        body = {"prompt": "x", "max_tokens": 200, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.signal()
            server.wait_for("draining")
            assert not probe(server, "readinessProbe")
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait() == 0


def test_an_engine_that_dies_ends_the_container(tmp_path: Path) -> None:
    with stub_server(tmp_path / "log", "--die-after", "0.5") as server:
        assert server.wait() == 1
