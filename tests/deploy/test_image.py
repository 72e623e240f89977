"""The images, made by carrying out the Dockerfile in a clean root (replay.py), and what runs in them: as a user of its
own, on a read-only file system, checked and drained as Docker would."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.deploy import clean_root
from tests.deploy.clean_root import MINOR, PACKAGES, Root
from tests.deploy.cuda import CUDA_TARGETS, cuda_toolkit, targets_of
from tests.deploy.dockerfile import Context, parse
from tests.deploy.replay import Container, Image, Replay
from tests.deploy.tools import ROOT, TOOLS
from tests.server.process import free_port

pytestmark = [pytest.mark.slow, pytest.mark.model]

SUITE = "bookworm"
LIMIT = 1_500_000_000  # bytes
COMPILERS = {
    "cc",
    "c++",
    "gcc",
    "g++",
    "clang",
    "clang++",
    "ld",
    "as",
    "make",
    "cmake",
    "ninja",
    "nvcc",
    "ptxas",
    "rustc",
}
KEY = "sk-image"


def new_replay(bases: dict[str, Callable[[], Image]], folder: Path, **arguments: str) -> Replay:
    """TORCH_ARGS and PIP_ARGS of the environment are passed on, as a person would pass them."""
    given = {name: os.environ[name] for name in ("TORCH_ARGS", "PIP_ARGS") if name in os.environ}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return Replay(
        parse(ROOT / "Dockerfile"), Context(ROOT), bases, folder, clean_root.network(), {**given, **arguments}
    )


def plain(root: Root) -> Image:
    return Image(root, {"PATH": clean_root.PATH, "LANG": "C.UTF-8"})


@pytest.fixture(scope="module")
def replay() -> Iterator[Replay]:
    """The cpu target, built."""
    if reason := clean_root.cannot():
        pytest.skip(reason)
    name, folder = f"python:{MINOR}-slim-{SUITE}", TOOLS / "replay-cpu"
    made = new_replay({name: lambda: plain(clean_root.python_base(SUITE))}, folder, PYTHON_IMAGE=name)
    try:
        made.build("cpu")
        yield made
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="module")
def image(replay: Replay) -> Image:
    return replay.build("cpu")


def run(image: Image, folder: Path, **env: str) -> Container:
    """Listening on loopback and a free port only: the network is the machine's."""
    settings = {
        "PAGEMILL_HOST": "127.0.0.1",
        "PAGEMILL_PORT": str(free_port()),
        "PAGEMILL_API_KEY": KEY,
        "PAGEMILL_KV_CACHE_MEMORY": "64MiB",
        "PAGEMILL_NUM_THREADS": "1",
    }
    return Container(image, folder / "log", folder / "data", settings | env)


def client_of(container: Container) -> httpx.Client:
    url = f"http://127.0.0.1:{container.env['PAGEMILL_PORT']}"
    return httpx.Client(base_url=url, timeout=120, trust_env=False, headers={"Authorization": f"Bearer {KEY}"})


@pytest.fixture(scope="module")
def container(image: Image, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    started = run(image, tmp_path_factory.mktemp("container"))
    try:
        started.wait_healthy(240)
        yield started
    finally:
        started.end()


def test_no_step_is_left_out(replay: Replay, image: Image) -> None:
    file = parse(ROOT / "Dockerfile")
    stages = [file.stage("cpu-build"), file.stage("cpu")]
    expected = {f"{stage.name}: {i.word} {i.rest}" for stage in stages for i in stage.instructions}
    assert set(replay.log) == expected
    assert len(replay.log) == sum(len(stage.instructions) for stage in stages)


def test_the_image_is_small(image: Image, capsys: pytest.CaptureFixture[str]) -> None:
    size = image.root.size()
    parts = {name: Root(image.root.path / name).size() for name in ("opt/pagemill", "usr", "var")}
    shown = ", ".join(f"/{name} {part / 1e6:.0f} MB" for name, part in parts.items())
    with capsys.disabled():
        print(f"\ncpu image: {size / 1e6:.0f} MB, of it {shown}")
    assert 500_000_000 < size < LIMIT


def test_nothing_in_it_compiles_or_installs(image: Image) -> None:
    runnable = {os.path.basename(path) for path in image.root.walk() if os.access(path, os.X_OK)}
    assert not runnable & COMPILERS
    assert "pagemill" in runnable
    assert not (image.root.path / "opt/pagemill/bin/pip").exists()
    assert not (image.root.path / "src").exists()


def test_it_answers(container: Container) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    with client_of(container) as client:
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200
        assert "Paris" in answer.json()["choices"][0]["text"]
        assert client.post("/v1/completions", json=body, headers={"Authorization": "Bearer no"}).status_code == 401


def test_it_can_send_traces(container: Container) -> None:
    program = "from server.tracing import Tracing; Tracing('http://127.0.0.1:9', '0', ())"
    made = container.inside(["python3", "-c", program])
    assert (made.returncode, made.stderr) == (0, "")


def test_the_health_check_of_the_image_works_in_it(container: Container) -> None:
    assert container.image.health_command
    checked = container.inside(container.image.health_command)
    assert (checked.returncode, checked.stdout.strip()) == (0, "ready")


def test_it_runs_as_a_user_that_can_write_to_the_volume_only(container: Container) -> None:
    status = Path(f"/proc/{container.first_process}/status").read_text()
    ids = {
        line.split(":")[0]: line.split()[1:] for line in status.splitlines() if line.startswith(("Uid", "Gid", "Cap"))
    }
    assert set(ids["Uid"]) == set(ids["Gid"]) == {"10001"}
    assert int(ids["CapEff"][0], 16) == 0
    for place in ("/", "/opt/pagemill", "/tmp", "/etc", "/usr/local"):
        assert container.inside(["touch", f"{place}/x"]).returncode != 0, place
        assert "Read-only" in container.inside(["touch", f"{place}/x"], user="0:0").stderr, place
    assert container.inside(["touch", "/data/x"]).returncode == 0


def test_what_it_keeps_is_in_the_volume(container: Container) -> None:
    inside = container.image.volumes[0]
    for variable in ("HF_HOME", "PAGEMILL_CACHE_DIR"):
        assert container.env[variable].startswith(inside + "/")
    assert any((container.volume / "pagemill").rglob("*")), "prepared weights"
    assert "cannot be written" not in container.log


def test_sigterm_lets_a_stream_finish(image: Image, tmp_path: Path) -> None:
    container = run(image, tmp_path)
    events: list[str] = []
    began = threading.Event()

    def stream() -> None:
        body = {"prompt": "Once", "max_tokens": 120, "stream": True, "ignore_eos": True}
        with client_of(container) as client, client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    events.append(line)
                    began.set()

    try:
        container.wait_healthy(240)
        thread = threading.Thread(target=stream)
        thread.start()
        assert began.wait(60)
        container.stop()
        assert container.process.wait(60) == 0
        thread.join()
    finally:
        container.end()
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in events[-2]
    assert "draining" in container.log


def test_a_wrong_setting_ends_it_with_one_sentence(image: Image, tmp_path: Path) -> None:
    container = run(image, tmp_path, PAGEMILL_MAX_NUM_SEQS="none")
    assert container.process.wait(60) == 2
    assert container.log.startswith("pagemill: PAGEMILL_MAX_NUM_SEQS")


# -- cuda ---------------------------------------------------------------------------------------------------------


def test_the_cuda_target_builds_kernels_for_what_it_promises() -> None:
    """NVIDIA's base images are Ubuntu with the toolkit in /usr/local/cuda; Debian plays Ubuntu here, and torch's CPU
    build its CUDA build, whose headers are the same."""
    if reason := clean_root.cannot():
        pytest.skip(reason)
    toolkit = cuda_toolkit()
    if toolkit is None:
        pytest.skip("nvcc is not here")
    file, folder = parse(ROOT / "Dockerfile"), TOOLS / "replay-cuda"

    def devel() -> Image:
        made = plain(clean_root.debian_base(SUITE, PACKAGES))
        made.env["PATH"] = f"/usr/local/cuda/bin:{made.env['PATH']}"
        made.toolkit = {toolkit: "/usr/local/cuda"}
        return made

    bases = {
        file.defaults["CUDA_BUILD_IMAGE"]: devel,
        file.defaults["CUDA_IMAGE"]: lambda: plain(clean_root.debian_base(SUITE, PACKAGES)),
    }
    replay = new_replay(bases, folder)
    try:
        image = replay.build("cuda")
        (library,) = [path for path in image.root.walk() if path.endswith("/engine/_C_cuda.so")]
        assert targets_of(Path(library)) == CUDA_TARGETS
        assert image.root.run(["pagemill", "--version"], env=image.env, user=image.user).startswith("pagemill ")
    finally:
        shutil.rmtree(folder)
