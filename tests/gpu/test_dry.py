"""tests/gpu/run.sh on a machine without a GPU: every stage as far as it goes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.place import HERE
from tests.gpu.results import read

SCRIPT = HERE / "run.sh"


@pytest.mark.slow
def test_every_stage_runs_up_to_its_first_device_call(tmp_path: Path) -> None:
    env = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "TOTAL": "3600"}
    ended = subprocess.run([SCRIPT, "--dry"], env=env, capture_output=True, text=True)
    log = (tmp_path / "stages.log").read_text()
    lines, stages = read(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert [stage["stage"] for stage in stages] == named_stages()
    assert {stage["status"] for stage in stages} == {"ok"}, f"{ended.stdout}\n{log[-5000:]}"
    said = (tmp_path / "table.md").read_text()
    assert said in ended.stdout
    assert all(line.what in said for line in lines)
    whats = " ".join(line.what for line in lines)
    for wanted in (
        "copy rate", "greedy rows as on the CPU", "served W5 x 256: ITL p99", "decode attention",
        "served over generate, W5", "decode, batch 1", "no kernel (host, waiting)", "copy_blocks", "linear head",
        "prefill attention", "sample 2 rows", "memcheck", "racecheck", "served over generate_batch", "op cases, rest",
    ):  # fmt: skip
        assert wanted in whats, f"{wanted}\n{said}"
    assert all(line.is_met in (None, True) for line in lines if line.stage == "engine"), said


def test_stages_have_limits_and_their_modules_exist() -> None:
    text = SCRIPT.read_text()
    found = re.findall(r"^part (?:'[^']+'|\S+) (\d+) (\w+)", text, re.MULTILINE)
    assert len(found) == len(named_stages()) - 1  # the first is a script
    assert all((HERE / f"{module}.py").is_file() and 0 < int(limit) <= 150 for limit, module in found)


def test_the_script_refuses_what_it_does_not_know() -> None:
    ended = subprocess.run([SCRIPT, "--dry", "rates", "wet"], capture_output=True, text=True)
    assert ended.returncode == 2
    assert "there is no stage 'wet'" in ended.stderr


def test_named_stages_run_alone_and_a_limit_cuts_one_off(tmp_path: Path) -> None:
    env = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable, "TOTAL": "6"}
    ended = subprocess.run([SCRIPT, "--dry", "copy_blocks", "op cases, rest"], env=env, capture_output=True, text=True)
    _, stages = read(tmp_path)
    assert [stage["stage"] for stage in stages] == ["prepare", "rates", "copy_blocks", "op cases, rest"]
    assert stages[-1]["status"] in ("not run: no time left", "out of time")
    assert "op cases, rest" in ended.stdout


def named_stages() -> list[str]:
    """In the order of run.sh."""
    found = re.findall(r"^(?:part|stage) (?:'([^']+)'|(\S+)) \d", SCRIPT.read_text(), re.MULTILINE)
    return [quoted or bare for quoted, bare in found]
