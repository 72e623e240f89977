"""Every bench of this folder runs, at its smallest setting, and prints a row of its table: nobody else would notice
that one no longer does."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from engine import ops
from tests.bench.yardsticks import compiler
from tests.tiny import tiny_folder

FOUND = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
NEED_COMPILER = ("bench_attention", "bench_linear", "bench_rows")  # for the yardsticks
NEED_MODEL = ("bench_status_page",)  # and a server that takes its time to start
WIDTHS = dict(hidden_size=64, intermediate_size=128, num_attention_heads=2, num_key_value_heads=1, head_dim=32)


class Run(NamedTuple):
    flags: str = ""
    row: str = r"\d"  # a regular expression of a row: the last, or of the part of the table that is most its own


SMALLEST = {
    "bench_attention": (
        Run("--threads 1 --only 'decode    1 x'", r"decode +1 x 2048.* us   torch +\d+ us$"),
        Run(
            "--threads 1 --only 'shared   16 x 1060, 1024 shared, [3'",
            r"shared .*  with blocks of their own +\d+ us$",
        ),
        Run("--threads 1 --only 'prefill 512 x 2000, [3'", r"prefill .* us   torch +\d+ us$"),
    ),
    "bench_decoder": (
        Run("--threads 1 --batches 2 --context 20 --prompt 4 --layers 1 --limit 0", r"rows    4  native .* GB/s$"),
    ),
    "bench_device_runner": (
        Run("--sequences 2 --steps 20", r"^2 sequences, logprobs: ModelRunner \d+, DeviceRunner \d+ us$"),
    ),
    "bench_linear": (
        Run("--threads 1 --rows 1 --only 960 --limit 0", r" 576 ->   960  M    1  pagemill +\d.* x [BF]$"),
    ),
    "bench_linear_quant": (
        Run("--threads 1 --rows 1 --only 960 --limit 0", r" 576 ->    960  M    1  bf16 +\d.* GFLOP/s$"),
    ),
    "bench_lora": (
        Run("--batches 8 --rank 4 --context 20 --layers 1 --limit 0", r"rows   8  native .* eight .* one-stepwise \d"),
    ),
    "bench_quantised": (Run("--model TINY --rounds 3", r"^  1 x 512 tokens  none .* int8 .* auto .* ms +\d\.\d\dx$"),),
    "bench_rows": (Run("--threads 1 --rows 2 --limit 0", r"rows    2  logprobs_of \(2 rows\) .* x [BF]$"),),
    "bench_sampler": (
        Run("--rows 2 --vocab 500 --threads 1 --limit 0", r"torch: sort, top-p 0\.9, flat +\d.* ms +\d+\.\d x$"),
    ),
    "bench_scheduler": (Run("--sequences 2 --steps 20", r"half of them cached +median +\d+ us   p99 +\d+ us$"),),
    "bench_sse": (
        Run("--streams 2 --tokens 20 --step-ms 1 --chat --stop", r"2 streams x 20 tokens in .* bytes per token$"),
    ),
    "bench_status_page": (
        Run("--watchers 0 1 --rounds 1 --streams 2 --tokens 96", r"^    1 +\d+\.\d +\d\.\d{3} .* \d\.\d{3}$"),
    ),
    "bench_step": (
        Run("--sequences 2 --vocab 500 --threads 1 --steps 20", r"5 of the drawn +schedule \d.*  update \d.*  all \d"),
    ),
}


def runs() -> Iterator[object]:
    """A bench without an entry runs as it is."""
    for name in FOUND:
        marks = [pytest.mark.slow, pytest.mark.model] if name in NEED_MODEL else []
        if name in NEED_COMPILER:
            missing = shutil.which(compiler()) is None
            marks.append(pytest.mark.skipif(missing, reason=f"no C++ compiler here ({compiler()})"))
        for number, run in enumerate(SMALLEST.get(name, (Run(),))):
            yield pytest.param(name, run, marks=marks, id=f"{name}-{number}" if number else name)


@pytest.fixture(autouse=True)
def same_process_afterwards() -> Iterator[None]:
    threads, level = torch.get_num_threads(), ops.isa()
    yield
    torch.set_num_threads(threads)
    ops.set_isa(level)


@pytest.mark.parametrize(("name", "run"), runs())
def test_it_prints_its_table(
    name: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(run.flags)
    if "TINY" in words:
        words[words.index("TINY")] = str(tiny_folder(tmp_path, "llama", **WIDTHS))
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.setenv("PAGEMILL_CACHE_DIR", str(tmp_path))
    import_module(f"tests.bench.{name}").main()
    table = capsys.readouterr().out
    assert re.search(run.row, table, re.MULTILINE), table
    assert not re.search(r"\b(nan|inf)\b", table), table


def test_settings_are_of_benches_that_there_are() -> None:
    assert {*SMALLEST, *NEED_COMPILER, *NEED_MODEL} <= set(FOUND)
