"""The parts of tests/gpu that need no GPU: what is written, what is counted, what the floors are."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest
import torch

from tests.gpu import cases, profiling
from tests.gpu.model import Shape
from tests.gpu.place import HERE, Place, measure, open_place
from tests.gpu.results import FILE, Results, read, table
from tests.gpu.stepping import Step, decode_steps, seconds_per_step


def test_a_line_is_there_when_it_is_told_and_the_table_has_it(tmp_path: Path) -> None:
    results = Results(tmp_path, "copy")
    results.tell("copy rate", 4000.5, "GB/s")
    results.tell("copy_blocks", 3500.0, "GB/s", share=0.875, of="copy rate", aim=0.9, note="slow")
    results.tell("served over generate", 12.0, "x", aim=10.0)
    results.tell("sample", 20.0, "us", share=1.5, of="x reading logits")
    results.tell("gaps", float("nan"), "ms")
    with (tmp_path / FILE).open("a") as file:
        file.write('{"stage": "copy", "status": "FAILED", "seconds": 3}\n{"stage": "cut o')
    lines, stages = read(tmp_path)
    assert [line.is_met for line in lines] == [None, False, True, None, None]
    assert stages == [{"stage": "copy", "status": "FAILED", "seconds": 3}]
    assert results.value("copy rate", 1.0) == 4000.5
    assert results.value("other rate", 1.0) == 1.0
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table(lines, stages).splitlines()]
    assert ["copy rate", "4,000 GB/s", "", "", ""] in rows
    assert ["copy_blocks", "3,500 GB/s", "88% of copy rate", "90%", "MISSED; slow"] in rows
    assert ["served over generate", "12 x", "", "10", "met"] in rows
    assert ["sample", "20 us", "1.50 x reading logits", "", ""] in rows
    assert ["gaps", "none ms", "", "", ""] in rows
    assert ["copy", "FAILED", "3"] in rows
    assert rows[-1] == ["aims met: 1 of 2"]


def test_a_table_of_nothing(tmp_path: Path) -> None:
    assert table(*read(tmp_path)).endswith("aims met: 0 of 0")


def test_a_step_of_llama_3_8b_reads_what_it_must(tmp_path: Path) -> None:
    shape = Shape.of(json.loads((HERE / "llama-3-8b" / "config.json").read_text()))
    assert shape.weights == 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336) + 4096 * 128256
    assert shape.kv_bytes == 131_072
    place = Place("cuda", Results(tmp_path, "model"))
    place.results.tell("copy rate", 4300.0, "GB/s")
    place.results.tell("torch matmul", 780.0, "TFLOP/s")
    assert shape.step_seconds(place, 1, 100) == pytest.approx((2 * shape.weights + 100 * 131_072) / 4.3e12)
    assert shape.step_seconds(place, 1024, 1) == pytest.approx(2 * shape.weights * 1024 / 7.8e14)


OURS = "void pagemill::cuda::(anonymous namespace)::"
KERNELS = {
    OURS + "decode_attention<__nv_bfloat16, __nv_bfloat16, 128>(AttentionParams)": "attention",
    OURS + "merge_splits<float>(pagemill::cuda::AttentionParams, int)": "attention",
    OURS + "multiply_tile<X, pagemill::cuda::Shape<16> >(LinearParams)": "linear layers",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT": "linear layers",
    OURS + "rope_and_write_heads<T>(HeadRows, CacheRows)": "norms, rotations, activations, cache",
    OURS + "norm_by_block<T, T>(NormArguments)": "norms, rotations, activations, cache",
    "pagemill::cuda::(anonymous namespace)::sample_rows(pagemill::cuda::SampleArguments)": "sampling",
    "pagemill::cuda::(anonymous namespace)::shape(float*, long, float, float)": "sampling",
    "pagemill::cuda::(anonymous namespace)::prepare(RowState, long const*)": "batch, embedding",
    "Memcpy HtoD (Pinned -> Device)": "copies",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int> >(int)": "other kernels",
}


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_are_sorted_by_their_own_names(name: str) -> None:
    assert profiling.kind_of(name) == KERNELS[name]


def test_overlapping_kernels_leave_the_time_without_any() -> None:
    spans = [("gemm", 1.0, 3.0), ("decode_attention", 2.0, 4.0), ("gemm", 6.0, 7.0)]
    profile = profiling.summarise(spans, wall=10.0)
    assert profile.seconds == {"linear layers": 3.0, "attention": 2.0, profiling.IDLE: 6.0}
    assert "gemm" in profile.text.splitlines()[0]


def test_a_profile_names_what_ran() -> None:
    left, right = torch.ones(64, 64), torch.ones(64, 64)

    def work() -> None:
        for _ in range(3):
            left @ right

    profile = profiling.profiled("cpu", work)
    assert profile.seconds["linear layers"] > 0
    assert "aten::mm" in profile.text
    assert profile.wall >= profile.seconds[profiling.IDLE]


def test_the_outcomes_of_a_run_that_was_cut_off_count() -> None:
    text = """
tests/ops/test_norm.py::test_norm[cuda-bf16] PASSED                   [ 25%]
tests/ops/test_norm.py::test_norm[cuda-f16] SKIPPED (there is no GPU) [ 50%]
[gw3] [ 50%] FAILED tests/ops/test_norm.py::test_norm[cuda-f32]
[gw11] [100%] PASSED tests/ops/test_norm.py::test_other[cuda-f32]
tests/ops/test_norm.py::test_las
FAILED tests/ops/test_norm.py::test_norm[cuda-f32] - assert 1 == 2
"""
    assert cases.outcomes(text) == {"PASSED": 2, "SKIPPED": 1, "FAILED": 1}
    assert cases.failures(text) == ["tests/ops/test_norm.py::test_norm[cuda-f32]"]


def test_nothing_that_a_run_has_started_outlives_it() -> None:
    leaves_a_child = "sleep 60 & echo $!; wait"
    text, ended = cases.run(["bash", "-c", leaves_a_child], 1.0)
    assert not ended
    with pytest.raises(ProcessLookupError):
        gone_within(5.0, int(text))
    text, ended = cases.run(["bash", "-c", "sleep 60 & echo $!"], 20.0)
    assert ended
    with pytest.raises(ProcessLookupError):
        gone_within(5.0, int(text))


def gone_within(seconds: float, pid: int) -> None:
    """Raises ProcessLookupError when there is no such process, or only what is left for its parent to read."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        os.kill(pid, 0)
        if "Z (zombie)" in Path(f"/proc/{pid}/status").read_text():
            raise ProcessLookupError
        time.sleep(0.01)


SANITIZER = """#!/usr/bin/env bash
echo "words: $*"
echo "tests/ops/test_norm.py::test_norm[cuda-bf16] PASSED [100%]"
echo "{said}"
"""


@pytest.mark.parametrize(
    ("tool", "said", "clean"),
    [
        ("memcheck", "========= ERROR SUMMARY: 0 errors", True),
        ("memcheck", "========= Invalid __global__ read of size 4 bytes", False),
        ("racecheck", "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)", True),
        (
            "racecheck",
            "========= Error: Race reported between Write access at a.cu:1 and Read access at a.cu:2",
            False,
        ),
    ],
)
def test_a_sanitizer_that_finds_something_fails_its_stage(
    tool: str,
    said: str,
    clean: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    sanitizer = tmp_path / "compute-sanitizer"
    sanitizer.write_text(SANITIZER.replace("{said}", said))
    sanitizer.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    place = Place("cuda", Results(tmp_path, tool))
    assert cases.sanitized(place, tool, 20.0) == (0 if clean else 1)
    (line,), _ = read(tmp_path)
    assert line.is_met is clean
    words = re.search("words: (.*)", capfd.readouterr().err)
    assert words is not None
    assert words[1].startswith(f"--tool {tool} ")
    assert "-m pytest" in words[1]


def test_a_rate_is_that_of_steps_in_which_all_decode() -> None:
    ends = [(2, 30, 1.0), (3, 13, 2.0), (3, 3, 2.5), (3, 3, 3.0), (3, 3, 3.5), (1, 1, 3.6)]
    steps = [Step(rows, tokens, 0.0, 0.0, retired_s=end) for rows, tokens, end in ends]
    full = decode_steps(steps, 3)
    assert [step.retired_s for step in full] == [2.5, 3.0, 3.5]
    assert seconds_per_step(full) == 0.5


def test_a_dry_place_measures_on_the_cpu(tmp_path: Path) -> None:
    place = open_place("x", None, ["--out", str(tmp_path / "out"), "--dry"])
    assert (place.device, place.sized(5, 1), place.model.name) == ("cpu", 1, "tiny-llama")
    ran: list[int] = []
    seconds, how = measure(place, [lambda: ran.append(1), lambda: ran.append(2)])
    assert ran == [1, 2, 1, 2]
    assert how == "dry"
    assert seconds > 0


def test_every_dependency_travels_or_is_there_already() -> None:
    text = (HERE / "wheels.txt").read_text()
    pins = re.findall(r"^([a-z0-9-]+)==[0-9.]+$", text, re.MULTILINE)
    there = next(line for line in text.splitlines() if line.startswith("# There already:")).split()[3:]
    assert len(pins) + text.count("#") == len(text.splitlines()), "a line that is no pin"
    assert not {"torch", "transformers", "flash-attn"} & set(pins)
    project = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["project"]
    needed = {name_of(spec) for spec in project["dependencies"]}
    assert needed <= {*pins, *there}
    for name in pins:
        wanted = {name_of(spec) for spec in requires(name) or () if "extra ==" not in spec}
        missing = wanted - {*pins, *there} - {"exceptiongroup"}  # of older Pythons
        assert not missing, f"{name} imports {missing}"


def name_of(spec: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", spec)[0].lower().replace("_", "-")


@pytest.mark.parametrize("script", ["run.sh", "pack.sh", "prepare.sh"])
def test_scripts_are_well_formed(script: str) -> None:
    assert subprocess.run(["bash", "-n", HERE / script]).returncode == 0


def test_every_kernel_has_its_cases_and_selections_have_bfloat16() -> None:
    ids = collected("cuda")
    assert all(any(all(word in found for word in words) for found in ids) for words in cases.KERNELS), ids
    short, small = collected(cases.SHORT), collected(cases.SMALL)
    for chosen in (short, small):
        assert any("test_cuda_linear" in found and "cuda-bfloat16" in found for found in chosen)
    assert not any("cuda-float16" in found for found in short)
    assert len(cases.KERNELS) <= len(small) <= 60  # each takes tens of times as long under a sanitizer
    assert set(short) | set(collected(cases.SELECTIONS["rest"])) == set(ids)


def collected(selection: str) -> list[str]:
    words = [word for word in cases.pytest_words(selection, 1) if word != "-v"]
    done = subprocess.run([*words, "--collect-only", "-q"], cwd=HERE.parents[1], capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "::" in line]
