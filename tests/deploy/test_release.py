"""The release workflow: what actionlint says of it, and that it builds what is there."""

from __future__ import annotations

import re
import subprocess

import pytest
import yaml

from tests.deploy.dockerfile import parse
from tests.deploy.tools import ROOT, find_tool, missing_tool

FILE = ROOT / ".github" / "workflows" / "release.yml"


def problems(text: str) -> str:
    if reason := missing_tool("actionlint"):
        pytest.skip(reason)
    words = [str(find_tool("actionlint")), "-no-color", "-stdin-filename", "release.yml", "-"]
    return subprocess.run(words, input=text, capture_output=True, text=True, timeout=60).stdout


def test_actionlint_has_nothing_to_say() -> None:
    text = FILE.read_text("utf-8")
    assert problems(text) == ""
    assert "tyr" in problems(text.replace("needs: try", "needs: tyr"))


def test_it_builds_the_wheel_and_both_images() -> None:
    workflow = yaml.safe_load(FILE.read_text("utf-8"))
    jobs = workflow["jobs"]
    targets = {row["target"] for row in jobs["images"]["strategy"]["matrix"]["include"]}
    stages = {stage.name for stage in parse(ROOT / "Dockerfile").stages}
    assert targets == {"cpu", "cuda"} <= stages
    scripts = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert any("make wheel" in script for script in scripts)
    # nothing is published that was not tried
    assert jobs["try"]["needs"] == "wheel"
    assert jobs["publish"]["needs"] == jobs["images"]["needs"] == "try"


def test_versions_agree_with_make_and_the_images() -> None:
    text = FILE.read_text("utf-8")
    (spec,) = set(re.findall(r"torch==([\d.]+)", text))
    assert f"TORCH_SPEC ?= torch=={spec}" in (ROOT / "Makefile").read_text("utf-8")
    cuda = parse(ROOT / "Dockerfile").defaults["CUDA_BUILD_IMAGE"].partition("-devel")[0]
    assert f"container: {cuda}-devel" in text
    actions = re.findall(r"uses: (\S+)", text)
    assert actions
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@v\d+", action) for action in actions)
