"""The mutation proof: plants one fault at a time into a copy of csrc/cuda and says which the cases catch.

`python -m tests.emulation.mutations [NAME...]`. A fault is one line changed or left out. It is caught if the cases
named beside it fail under some seed, or end in a crash; compiling must work, for a fault the compiler finds proves
nothing. Exits with 1 if one is not caught, or if the cases do not pass on an unchanged copy. New kernels bring their
own faults.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.emulation.build import ROOT, Target, build, compiler

NORM, ACTIVATION, CACHE = "test_norm.py", "test_activation.py", "test_cache_ops.py"
HEADS, SAMPLER, LOGITS, BATCH = (
    "test_cuda_heads.py",
    "test_cuda_sampler.py",
    "test_cuda_logits.py",
    "test_cuda_batch.py",
)
ATTENTION, LINEAR, LAYER = "test_cuda_attention.py", "test_cuda_linear.py", "test_layer_norm.py"
STREAM, SOFTMAX, DECODING = "attention_stream.cuh", "attention_softmax.cuh", "attention_decode.cuh"


@dataclass(frozen=True)
class Fault:
    """`old` stands on one line of `file` and nowhere else in it, after `after` if given; `new` takes its place."""

    name: str
    file: str
    old: str
    new: str
    cases: str  # the file in tests/ops that should notice
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
    Fault("layers staged over one another", "blocks.cu", "i * staged_bytes + offset", "i * staged_bytes", CACHE),
    Fault("sine of the other half", "heads.cuh", "high * to_float(sin[a])", "high * to_float(sin[b])", HEADS),
    Fault("last pair of a head left out", "heads.cuh", "if (pair < dim / 2)", "if (pair < dim / 2 - 1)", HEADS),
    Fault("one round too few", "philox.cuh", "round < 10", "round < 9", SAMPLER),
    Fault("carry lost in the place", "philox.cuh", "+ (low >> 32)", "", SAMPLER),
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
    Fault("a warp left out of the merge", "logprobs.cu", "w = 0; w < kRowWarps", "w = 1; w < kRowWarps", SAMPLER),
    Fault("mask one id too far", "logits.cu", "if (id >= vocab ||", "if (id > vocab ||", LOGITS),
    Fault("repetition after the counts", "logits.cu", "logit > 0.0f ?", "logit >= 1.0f ?", LOGITS),
    Fault("own count in the start", "batch.cu", "i = thread; i < seq;", "i = thread; i <= seq;", BATCH),
    Fault("padding taken for a sequence", "batch.cu", "seq >= *num_seqs", "seq > *num_seqs", BATCH),
    Fault("waits for one copy too few", STREAM, "wait<SLOTS - 2>", "wait<SLOTS - 1>", ATTENTION),
    Fault("slot read before all copies are seen", STREAM, "      sync_block();", "", ATTENTION),
    Fault("next split's blocks not looked up", STREAM, "tile_ % kTilesPerSplit == 0", "false", ATTENTION),
    Fault("tail of a block not zeroed", STREAM, "first_key + key < keys_.end", "true", ATTENTION),
    Fault("causal mask off by one", "attention_params.cuh", "+ last + 1 :", "+ last + 2 :", ATTENTION),
    Fault(
        "window off by one",
        "attention_params.cuh",
        "begin = position - params.window + 1;",
        "begin = position - params.window + 2;",
        ATTENTION,
    ),
    Fault("half of the columns left out", "attention_rows.cuh", "+ shuffle_xor(total[half], 2)", "", ATTENTION),
    Fault("fp8 dims paired wrongly", "attention_rows.cuh", "4 * t + 2 * second", "2 * t + 8 * second", ATTENTION),
    Fault(
        "total not scaled to the new top",
        SOFTMAX,
        "fmaf(gathered.total[half], keep, total)",
        "gathered.total[half] + total",
        ATTENTION,
    ),
    Fault(
        "split folded with the other's weight",
        SOFTMAX,
        "fmaf(right, add, left * keep)",
        "fmaf(right, keep, left * add)",
        ATTENTION,
    ),
    Fault("partial rows at the wrong stride", DECODING, "split * num_rows + row", "split * 16 + row", ATTENTION),
    Fault("rings refilled while others read", DECODING, "      sync_block();", "", ATTENTION, "fold_round(group"),
    Fault("folded values not cleared", DECODING, "if (first_round)", "if (false)", ATTENTION),
    Fault(
        "last group of a merge lost",
        "attention_merge.cuh",
        "first < num_splits;",
        "first + 1 < num_splits;",
        ATTENTION,
    ),
    Fault("scan counts a warp twice", "attention_plan.cuh", "warp < warp_id()", "warp <= warp_id()", ATTENTION),
    Fault("prefill forgets earlier splits", "attention_prefill.cuh", "if (has_folded)", "if (false)", ATTENTION),
    Fault(
        "waits for one slot too few", "linear_feed.cuh", "wait<Shape::kSlots - 2>", "wait<Shape::kSlots - 1>", LINEAR
    ),
    Fault("slot read before others' copies", "linear_feed.cuh", "    sync_block();", "", LINEAR),
    Fault("tail of K not zeroed", "linear_feed.cuh", "row_exists && k < params_.in_features;", "row_exists;", LINEAR),
    Fault("gate and up rows mixed", "linear_feed.cuh", "row_ % 16 >= 8", "row_ % 16 > 8", LINEAR),
    Fault(
        "a split one chunk short",
        "linear.cu",
        "left = per_split;",
        "left = per_split - 1;",
        LINEAR,
        "fold<Shape>(total",
    ),
    Fault("last split of a merge lost", "linear.cu", "split < p.splits.count", "split + 1 < p.splits.count", LINEAR),
    Fault("sums not started anew", "linear.cu", "        sums[m][n][i] = 0.0f;", "", LINEAR, "total[m][n][i] + sums"),
    Fault("up half's sums over the gate's", "linear.cu", "n % 2 == 1 ? p.out_features", "n % 2 == 1 ? 0", LINEAR),
    Fault(
        "splits by the number of rows",
        "linear.cu",
        "splits_of(p.weight_rows,",
        "splits_of(p.weight_rows * rows,",
        LINEAR,
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


def run_cases(library: Path, cases: str, asan: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PAGEMILL_EMULATED_LIBRARY": str(library), "OMP_WAIT_POLICY": "PASSIVE"}
    if asan:
        found = subprocess.run([compiler(), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
        environment["LD_PRELOAD"] = found.stdout.strip()
        environment["ASAN_OPTIONS"] = "detect_leaks=0:detect_stack_use_after_return=0:exitcode=99"
    selection = [
        "-k",
        "emulated- and not amx_emulated",
        "-m",
        "not gpu",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "--capture=sys",
    ]
    command = [sys.executable, "-m", "pytest", f"tests/ops/{cases}", *selection]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)


def was_caught(done: subprocess.CompletedProcess[str]) -> bool:
    """Cases failed, or the process did not survive them; anything else that goes wrong is not a catch."""
    return done.returncode in (1, 99) or done.returncode < 0


def reason(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    lines += [line for line in done.stderr.splitlines() if "SUMMARY" in line]
    return lines[0].removeprefix("E").strip()[:90] if lines else f"exit status {done.returncode}"


def try_fault(fault: Fault, original: Target, folder: Path) -> tuple[bool, str]:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(original.folder, folder)  # with the objects' times: only what the fault touches is compiled again
    kernels = folder / "src" / "cuda"
    plant(fault, kernels)
    done = run_cases(build(Target(folder, kernels, asan=fault.asan, flags=("-w",))), fault.cases, fault.asan)
    return was_caught(done), reason(done)


def originals(folder: Path, faults: Sequence[Fault]) -> dict[bool, Target]:
    """Unchanged copies, built, with their cases run: by whether they have AddressSanitizer."""
    made = {}
    for asan in sorted({fault.asan for fault in faults}):
        target = Target(
            folder / f"original{'-asan' * asan}", folder / f"original{'-asan' * asan}" / "src" / "cuda", asan=asan
        )
        shutil.rmtree(target.kernels, ignore_errors=True)
        shutil.copytree(ROOT / "csrc" / "cuda", target.kernels)
        library = build(target)
        for cases in sorted({fault.cases for fault in faults if fault.asan == asan}):
            done = run_cases(library, cases, asan)
            if done.returncode != 0:
                sys.exit(f"{cases} fails without a fault:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        made[asan] = target
    return made


def main(names: Sequence[str]) -> None:
    faults = [f for f in FAULTS if not names or any(name in f.name or name == f.file for name in names)]
    folder = ROOT / "build" / "mutations"
    made = originals(folder, faults)
    missed = 0
    for fault in faults:
        start = time.monotonic()
        caught, why = try_fault(fault, made[fault.asan], folder / "changed")
        missed += not caught
        verdict = "caught" if caught else "NOT CAUGHT"
        print(f"{verdict:10}  {fault.file:14} {fault.name:40} {time.monotonic() - start:4.0f} s  {why}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} faults caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
