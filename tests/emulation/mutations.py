"""The mutation proof: plants one fault at a time into a copy of csrc/cuda and says which the cases catch.

`python -m tests.emulation.mutations [--jobs N] [NAME...]`. A fault is one line changed or left out. It is caught if
the cases named beside it fail under some seed, or end in a crash; compiling must work, for a fault the compiler
finds proves nothing. Exits with 1 if one is not caught, or if a case that caught one fails without it too. New kernels
bring their own faults.

Only what includes the changed file is compiled again; the rest of a faulty library are the objects of the library that
other tests use.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.emulation.build import ROOT, Target, build, compile_source, compiler, default_target, link, reads

NORM, ACTIVATION, CACHE = "test_norm.py", "test_activation.py", "test_cache_ops.py"
HEADS, SAMPLER, LOGITS, BATCH = (
    "test_cuda_heads.py",
    "test_cuda_sampler.py",
    "test_cuda_logits.py",
    "test_cuda_batch.py",
)
ATTENTION, LINEAR, LAYER = "test_cuda_attention.py", "test_cuda_linear.py", "test_layer_norm.py"
WORDS, LOGPROBS = f"{SAMPLER} philox_words", "test_sampler.py logprobs"
GATE, NEIGHBOURS = f"{LINEAR} gate_is", f"{LINEAR} neighbours"
ROWS, SPLITS = f"{ATTENTION} against_float64 and g3", f"{ATTENTION} many_splits or grid_and_workspace and g3"
DEVICE, PLAIN_SAMPLER = "test_device_ops.py", "test_sampler.py"
STREAM, SOFTMAX, DECODING = "attention_stream.cuh", "attention_softmax.cuh", "attention_decode.cuh"
# Where a header is part of several: the one that the cases reach.
UNITS = {ATTENTION: "paged_attention_64.cu"}
TIME_LIMIT_S = 600


@dataclass(frozen=True)
class Fault:
    """`old` stands on one line of `file` and nowhere else in it, after `after` if given; `new` takes its place."""

    name: str
    file: str
    old: str
    new: str
    cases: str  # the file in tests/ops that should notice; after a space, which of its cases (pytest -k)
    after: str = ""
    asan: bool = False  # strays outside of tensors, which only AddressSanitizer is sure to see


FAULTS = (
    Fault("barrier missing before sums are read", "norm.cu", "  sync_block();", "", NORM),
    Fault("accumulator not initialised", "norm.cu", "float sum = 0.0f;", "float sum;", NORM, "sum_of"),
    Fault("norm of x instead of the sum", "norm.cu", "return residual;", "return x;", NORM),
    Fault("lane leaves before its warp meets", "norm.cu", "row >= a.rows)", "row >= a.rows || lane_id() == 31)", NORM),
    Fault("bias taken from the weights' row", "norm.cu", "load_some(weight + a.dim,", "load_some(weight,", LAYER),
    Fault("squares not about the mean", "norm.cu", "fmaf(x - mean, x - mean, s)", "fmaf(x, x, s)", LAYER),
    Fault("sums written while others read", "norm.cu", "(shared) + place *", "(shared) + 0 *", LAYER),
    Fault("bounds check missing", "activation.cu", "  if (start >= width) return;", "", ACTIVATION, asan=True),
    Fault("tail one element short", "rows.cuh", "if (start + i < length)", "if (start + i + 1 < length)", ACTIVATION),
    Fault("row at the wrong stride", "cache.cu", "head * rows.value_head_stride", "head * rows.value_dim", CACHE),
    Fault(
        "padding slots written", "cache.cu", "  if (slot < 0) return;", "", CACHE, "write_heads(CacheRows", asan=True
    ),
    Fault("scaled the wrong way", "cache.cu", "to_float(from[i + j]) / by", "to_float(from[i + j]) * by", HEADS),
    Fault("copy runs past the block", "blocks.cu", "if (at < end) store", "if (at <= end) store", CACHE),
    Fault("layers staged over one another", "blocks.cu", ".staged_bytes + offset", ".staged_bytes", CACHE),
    Fault("sine of the other half", "heads.cuh", "high * to_float(sin[a])", "high * to_float(sin[b])", HEADS),
    Fault("last pair of a head left out", "heads.cuh", "if (pair < dim / 2)", "if (pair < dim / 2 - 1)", HEADS),
    Fault("one round too few", "philox.cuh", "round < 10", "round < 9", SAMPLER),
    Fault("carry lost in the place", "philox.cuh", "+ (low >> 32)", "", WORDS),
    Fault("walk loses its running sum", "sampler.cu", "shuffle(sum, kWarp - 1)", "shuffle(sum, 0)", SAMPLER),
    Fault("list full of just the top k", "sampler.cu", "(top_k) <= many)", "(top_k) < many)", SAMPLER),
    Fault("stretches not cleared", "sampler.cu", "shared.bins[i] = 0;", "{}", SAMPLER, "void sum_stretches"),
    Fault("list begins one late", "ranking.cuh", "shared.list_count = 0;", "shared.list_count = 1;", SAMPLER),
    Fault(
        "floor above the nucleus",
        "sampler.cu",
        "static_cast<float>(reached) : low",
        "static_cast<float>(reached + 1) : low",
        SAMPLER,
    ),
    Fault("barrier missing in the scan", "ranking.cuh", "  sync_block();", "", SAMPLER, "= sum;"),
    Fault("ties to the higher id", "ranking.cuh", "(kIdMask - static_cast", "(static_cast", SAMPLER, "rank_of("),
    Fault("bin off by one", "ranking.cuh", "before < target", "before <= target", SAMPLER),
    Fault("a warp left out of the merge", "logprobs.cu", "w = 0; w < kRowWarps", "w = 1; w < kRowWarps", LOGPROBS),
    Fault("mask one id too far", "logits.cu", "if (id >= vocab ||", "if (id > vocab ||", LOGITS),
    Fault("repetition after the counts", "logits.cu", "logit > 0.0f ?", "logit >= 1.0f ?", LOGITS),
    Fault("own count in the start", "batch.cu", "i = thread; i < seq;", "i = thread; i <= seq;", BATCH),
    Fault("padding taken for a sequence", "batch.cu", "seq >= *num_seqs", "seq > *num_seqs", BATCH),
    Fault("padding given a length", "batch.cu", "row < 0 ? 0 : first + count", "first + count", DEVICE),
    Fault("an id that failed is stored", "batch.cu", "drawn[i] < 0 ? 0 : drawn[i]", "drawn[i]", DEVICE),
    Fault("ranks count the id itself", "logprobs.cu", "other > logit", "other >= logit", PLAIN_SAMPLER),
    Fault("rows not taken from their source", "logprobs.cu", ": a.source[row]) * a", ": row) * a", PLAIN_SAMPLER),
    Fault("last elements of K left out", "linear_float32.cuh", "i < many", "i < many - 1", LINEAR),
    Fault("second launch starts anew", "blocks.cu", "offsets[first + i]", "offsets[i]", CACHE, asan=True),
    Fault("waits for one copy too few", STREAM, "wait<SLOTS - 2>", "wait<SLOTS - 1>", ROWS),
    Fault("slot read before all copies are seen", STREAM, "      sync_block();", "", ROWS),
    Fault("next split's blocks not looked up", STREAM, "tile_ % kTilesPerSplit == 0", "false", ROWS),
    Fault("tail of a block not zeroed", STREAM, "first_key + key < keys_.end", "true", ROWS),
    Fault("causal mask off by one", "attention_params.cuh", "+ last + 1 :", "+ last + 2 :", ROWS),
    Fault(
        "window off by one",
        "attention_params.cuh",
        "begin = position - params.window + 1;",
        "begin = position - params.window + 2;",
        f"{ATTENTION} window-5",
    ),
    Fault("half of the columns left out", "attention_rows.cuh", "+ shuffle_xor(total[half], 2)", "", ROWS),
    Fault(
        "fp8 dims paired wrongly",
        "attention_rows.cuh",
        "4 * t + 2 * second",
        "2 * t + 8 * second",
        f"{ATTENTION} fp8_cache and g3",
    ),
    Fault(
        "total not scaled to the new top",
        SOFTMAX,
        "fmaf(gathered.total[half], keep, total)",
        "gathered.total[half] + total",
        ROWS,
    ),
    Fault(
        "split folded with the other's weight",
        SOFTMAX,
        "fmaf(right, add, left * keep)",
        "fmaf(right, keep, left * add)",
        ROWS,
    ),
    Fault("partial rows at the wrong stride", DECODING, "split * num_rows + row", "split * 16 + row", SPLITS),
    Fault("rings refilled while others read", DECODING, "      sync_block();", "", SPLITS, "fold_round(group"),
    Fault("folded values not cleared", DECODING, "if (first_round)", "if (false)", SPLITS),
    Fault(
        "last group of a merge lost",
        "attention_merge.cuh",
        "first < num_splits;",
        "first + 1 < num_splits;",
        SPLITS,
    ),
    Fault(
        "scan counts a warp twice",
        "attention_plan.cuh",
        "warp < warp_id()",
        "warp <= warp_id()",
        f"{ATTENTION} many_sequences",
    ),
    Fault("prefill forgets earlier splits", "attention_prefill.cuh", "if (has_folded)", "if (false)", ROWS),
    Fault(
        "waits for one slot too few", "linear_feed.cuh", "wait<Shape::kSlots - 2>", "wait<Shape::kSlots - 1>", LINEAR
    ),
    Fault("slot read before others' copies", "linear_feed.cuh", "    sync_block();", "", LINEAR),
    Fault("tail of K not zeroed", "linear_feed.cuh", "row_exists && k < params_.in_features;", "row_exists;", LINEAR),
    Fault("gate and up rows mixed", "linear_feed.cuh", "row_ % 16 >= 8", "row_ % 16 > 8", GATE),
    Fault(
        "a split one chunk short",
        "linear.cu",
        "left = per_split;",
        "left = per_split - 1;",
        NEIGHBOURS,
        "fold<Shape>(total",
    ),
    Fault("last split of a merge lost", "linear.cu", "split < p.splits.count", "split + 1 < p.splits.count", LINEAR),
    Fault(
        "sums not started anew", "linear.cu", "        sums[m][n][i] = 0.0f;", "", NEIGHBOURS, "total[m][n][i] + sums"
    ),
    Fault("up half's sums over the gate's", "linear.cu", "n % 2 == 1 ? p.out_features", "n % 2 == 1 ? 0", NEIGHBOURS),
    Fault(
        "splits by the number of rows",
        "linear.cu",
        "splits_of(p.weight_rows,",
        "splits_of(p.weight_rows * rows,",
        NEIGHBOURS,
    ),
)


def plant(fault: Fault, kernels: Path) -> None:
    """Raises ValueError if the fault does not fit the source as it is now."""
    path = kernels / fault.file
    text = path.read_text()
    begin = text.find(fault.after)
    at = text.find(fault.old, max(begin, 0))
    if begin < 0 or at < 0:
        raise ValueError(f"{fault.name}: {fault.file} has no `{fault.old}` after `{fault.after}`")
    path.write_text(text[:at] + fault.new + text[at + len(fault.old) :])


def run_cases(library: Path, cases: Sequence[str], asan: bool) -> subprocess.CompletedProcess[str]:
    """cases: words for pytest. Raises subprocess.TimeoutExpired."""
    environment = {**os.environ, "PAGEMILL_EMULATED_LIBRARY": str(library), "OMP_WAIT_POLICY": "PASSIVE"}
    if asan:
        found = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment["LD_PRELOAD"] = found.stdout.strip()
        environment["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0:exitcode=99"
    command = [sys.executable, "-m", "pytest", *cases, "-v", "-p", "no:cacheprovider", "--no-header", "--capture=sys"]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S
    )


def until_one_fails(library: Path, fault: Fault) -> subprocess.CompletedProcess[str]:
    file, _, which = fault.cases.partition(" ")
    wanted = "emulated- and not amx_emulated" + (f" and ({which})" if which else "")
    return run_cases(library, [f"tests/ops/{file}", "-k", wanted, "-m", "not gpu", "-x"], fault.asan)


def failed_case(done: subprocess.CompletedProcess[str]) -> str | None:
    """The case that failed, or that the process did not survive; anything else that goes wrong is not a catch."""
    if done.returncode not in (1, 99) and done.returncode >= 0:
        return None
    begun = re.findall(r"^(tests/\S+::\S+)", done.stdout, re.MULTILINE)
    failed = re.search(r"^(?:FAILED|ERROR) (tests/\S+::\S+)", done.stdout, re.MULTILINE)
    return failed[1] if failed else begun[-1] if begun else None


def reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    lines += [line for line in done.stderr.splitlines() if "SUMMARY" in line]
    return lines[0].removeprefix("E").strip()[:90] if lines else f"exit status {done.returncode}"


def build_faulty(fault: Fault, folder: Path) -> Path:
    """The library with the fault. Raises ValueError if it does not fit the source."""
    shutil.rmtree(folder, ignore_errors=True)
    kernels = folder / "src" / "cuda"
    shutil.copytree(ROOT / "csrc" / "cuda", kernels)
    plant(fault, kernels)
    whole, changed = default_target(fault.asan), Target(folder, kernels, asan=fault.asan, flags=("-w",))
    unit = UNITS.get(fault.cases.partition(" ")[0])
    again = [s for s in changed.sources() if kernels / fault.file in reads(s, changed.include)]
    again = [source for source in again if unit in (None, source.name)]
    if not again:
        raise ValueError(f"{fault.name}: nothing that its cases reach includes {fault.file}")
    names = {source.name for source in again}
    rest = [whole.object_of(source) for source in whole.sources() if source.name not in names]
    link(changed, [*(compile_source(changed, source) for source in again), *rest])
    return changed.built


def try_fault(fault: Fault, folder: Path) -> str | None:
    """Prints a line. The case that caught it."""
    start = time.monotonic()
    try:
        done = until_one_fails(build_faulty(fault, folder), fault)
        case, why = failed_case(done), reason(done)
    except subprocess.TimeoutExpired:
        case, why = None, f"no end within {TIME_LIMIT_S} s"
    shutil.rmtree(folder)
    verdict, seconds = "caught" if case else "NOT CAUGHT", time.monotonic() - start
    named = case.partition("::")[2] + ": " if case else ""
    print(f"{verdict:10}  {fault.file:21} {fault.name:38} {seconds:4.0f} s  {named}{why}", flush=True)
    return case


def check_without(cases: Sequence[str], asan: bool) -> None:
    """Exits if one of the cases that caught a fault fails on the library as it is."""
    done = run_cases(build(default_target(asan)), cases, asan)
    if done.returncode != 0:
        sys.exit(f"without a fault:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="plant faults into the CUDA kernels")
    parser.add_argument("names", nargs="*", metavar="NAME", help="part of a fault's name, or a file; all without")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="so many at a time")
    given = parser.parse_args(arguments)
    faults = [f for f in FAULTS if not given.names or any(n in f.name or n == f.file for n in given.names)]
    folder = ROOT / "build" / "mutations"
    for asan in {fault.asan for fault in faults}:
        build(default_target(asan))
    with ThreadPoolExecutor(given.jobs) as pool:
        cases = list(pool.map(try_fault, faults, [folder / str(number) for number in range(len(faults))]))
    for asan in (False, True):
        if caught := {case for fault, case in zip(faults, cases, strict=True) if case and fault.asan == asan}:
            check_without(sorted(caught), asan)
    print(f"{len(faults) - cases.count(None)} of {len(faults)} faults caught")
    sys.exit(None in cases)


if __name__ == "__main__":
    main()
