"""The Dockerfile as a text: what it copies exists, what it sets is known, what it pins is what was tested. That its
steps work is test_image's business."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from packaging.version import Version

from server.settings import ENV_PREFIX, Settings
from tests.deploy import pins
from tests.deploy.dockerfile import Context, DockerfileError, Stage, assignments, flags, parse, substitute
from tests.deploy.tools import ROOT, find_tool, missing_tool

FILE = parse(ROOT / "Dockerfile")
FINAL = ("cpu", "cuda")


def words_of(stage: Stage, word: str) -> list[str]:
    return [instruction.rest for instruction in stage.instructions if instruction.word == word]


def test_there_are_two_targets_each_with_a_stage_that_builds() -> None:
    assert [stage.name for stage in FILE.stages] == ["cpu-build", "cpu", "cuda-build", "cuda"]
    for name in FINAL:
        copies = [flags(rest)[0].get("from") for rest in words_of(FILE.stage(name), "COPY")]
        assert copies == [f"{name}-build"]


@pytest.mark.parametrize("name", FINAL)
def test_the_final_stages_say_what_an_operator_relies_on(name: str) -> None:
    stage = FILE.stage(name)
    assert words_of(stage, "USER") == ["10001:10001"]
    assert words_of(stage, "VOLUME") == ["/data"]
    assert words_of(stage, "STOPSIGNAL") == ["SIGTERM"]
    (check,) = words_of(stage, "HEALTHCHECK")
    assert "curl" not in check
    assert "healthcheck.py" in check
    env = assignments(" ".join(words_of(stage, "ENV")), {})
    assert env["HF_HOME"].startswith("/data/")
    for variable in env:
        if variable.startswith(ENV_PREFIX):
            assert variable.removeprefix(ENV_PREFIX).lower() in Settings.model_fields, variable
    assert not any("g++" in rest for rest in words_of(stage, "RUN"))


def test_both_targets_end_alike() -> None:
    """What runs does not depend on the device; only the base and what was built do."""
    last = [
        [(i.word, i.rest) for i in FILE.stage(name).instructions if i.word not in ("RUN", "COPY")] for name in FINAL
    ]
    assert last[0] == last[1]


def test_everything_that_is_copied_is_in_the_context_and_nothing_else_is() -> None:
    context = Context(ROOT)
    for stage in FILE.stages:
        for rest in words_of(stage, "COPY"):
            given, text = flags(rest)
            if "from" not in given:
                for source in text.split()[:-1]:
                    assert context.files(source)
    for name in ("README.md", "server/cli.py", "csrc/cpu/isa.cpp", "deploy/requirements.txt"):
        assert context.has(name)
    for name in (".git/HEAD", ".venv/bin/python", "build/dev/_C.so", "tests/models.py", "deploy/kubernetes/x.yaml"):
        assert not context.has(name)
    assert not context.has("engine/_C.so")
    assert not context.has("server/__pycache__/cli.cpython-311.pyc")


def test_base_images_are_pinned() -> None:
    for stage in FILE.stages:
        image = substitute(stage.base, FILE.defaults)
        name, _, tag = image.partition(":")
        assert name
        assert any(letter.isdigit() for letter in tag), image


def test_the_pinned_packages_are_the_whole_of_what_the_server_needs() -> None:
    pinned = pins.pinned()
    missing = set(pins.closure()) - set(pinned)
    assert not missing, "run python -m tests.deploy.pins"
    for requirement in pins.direct():
        if requirement.name != pins.LEFT_OUT and (requirement.marker is None or requirement.marker.evaluate()):
            assert Version(pinned[requirement.name]) in requirement.specifier, requirement


def test_the_torch_of_the_images_is_the_one_that_make_takes_and_the_server_allows() -> None:
    (allowed,) = [requirement.specifier for requirement in pins.direct() if requirement.name == pins.LEFT_OUT]
    makefile = (ROOT / "Makefile").read_text("utf-8")
    for name in ("cpu-build", "cuda-build"):
        (spec,) = [rest for rest in words_of(FILE.stage(name), "ARG") if rest.startswith("TORCH_SPEC=")]
        version = spec.removeprefix("TORCH_SPEC=torch==")
        assert Version(version) in allowed
        assert f"TORCH_SPEC ?= torch=={version}" in makefile


def test_hadolint_has_nothing_to_say() -> None:
    if reason := missing_tool("hadolint"):
        pytest.skip(reason)
    command = [str(find_tool("hadolint")), "--format", "json", str(ROOT / "Dockerfile")]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60).stdout)
    assert found == []


# -- the reader itself --------------------------------------------------------------------------------------------


def test_a_file_is_read_as_docker_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text('ARG A=1\n# note\nFROM x:${A} AS one\nRUN a \\\n    # inside\n    && b\nCMD ["p", "q r"]\n')
    file = parse(path)
    assert file.defaults == {"A": "1"}
    (stage,) = file.stages
    assert substitute(stage.base, file.defaults) == "x:1"
    run, command = stage.instructions
    assert run.rest == "a && b"
    assert command.json_list() == ["p", "q r"]


@pytest.mark.parametrize("line", ["ONBUILD RUN x", "FROM x", "RUN x \\"])
def test_what_is_not_known_is_an_error(tmp_path: Path, line: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(f"FROM x AS y\n{line}\n")
    with pytest.raises(DockerfileError):
        parse(path)
