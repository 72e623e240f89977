"""The op cases of tests/ops on the device, and a few of them under compute-sanitizer.

    python -m tests.gpu.cases short|rest|memcheck|racecheck --seconds N [--out FOLDER] [--dry]

short: what an engine cannot do without, in bfloat16; rest: everything else. What has run when the time is over counts.
Without a GPU the cases are skipped, so a dry run shows that they are found, and how many.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.gpu.place import Place, open_place

# -k looks for words anywhere in an id: "float16" alone would be in "bfloat16", too.
SHORT = (
    "cuda and (paged_attention or cuda_attention or cuda_linear or cuda_sampler or cache_ops) and not cuda-float16 "
    "and not cuda-float32"
)
SELECTIONS = {"short": SHORT, "rest": f"cuda and not ({SHORT})"}
# A case or a few of every kernel, by words that all stand in their ids: each takes tens of times as long as alone.
KERNELS = (
    ("strided_queries", "bf16"), ("rows_without_keys", "bf16"), ("many_splits",), ("fp8_cache", "bf16", "d128"),
    ("no_16_bytes", "bfloat16"), ("neighbours", "bfloat16-plain-72-1000"), ("float32_has_the_bits",),
    ("gate_is_a_second", "bfloat16-3"), ("fused_add", "bfloat16-60"), ("rows_are_rounded_once", "llama"),
    ("gated[", "bfloat16-60"), ("extremes",), ("fused_projection", "bfloat16"), ("rotations", "bfloat16"),
    ("rotation_and_cache",), ("written_values", "1thread", "bfloat16-d64"), ("copies_every_layer", "1thread"),
    ("gather_and_scatter", "1thread"), ("pinned_memory",), ("advance_batch", "cuda-4"),
    ("batches_with_padding", "cuda-4"), ("stored_tokens",), ("drawn_tokens_are_counted",), ("counts_of_a_history",),
    ("penalties", "slots"), ("biases_and_bans",), ("token_bitmask",), ("logit_does_not_depend",), ("bad_rows",),
    ("peaked_rows",), ("most_likely_ids", "5000-20"), ("the_most_likely_ids", "128-banned"),
    ("logprobs_of_odd_rows",),
)  # fmt: skip
SMALL = "cuda and (" + " or ".join(f"({' and '.join(words)})" for words in KERNELS) + ")"
SANITIZER = "/usr/local/cuda/bin/compute-sanitizer"  # where it is not on the PATH
# Calls of the runtime that fail are torch's, which tries what a driver can do; ours are asserted by the cases.
OPTIONS = {"memcheck": ("--report-api-errors", "no"), "racecheck": ()}
_PROGRESS = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] (\w+) |\S+::.* (PASSED|FAILED|ERROR|SKIPPED)\b)")


def pytest_words(selection: str, processes: int) -> list[str]:
    words = [sys.executable, "-m", "pytest", "-c", "tests/gpu/op_cases.ini", "--rootdir", ".", "tests/ops"]
    words += ["-v", "--tb", "short", "-m", "gpu", "-k", selection]
    if processes > 1 and importlib.util.find_spec("xdist"):
        words += ["-n", str(processes)]
    return words


def run(words: list[str], seconds: float, env: dict[str, str] | None = None) -> tuple[str, bool]:
    """(output, whether it ended by itself); the output goes to stderr as well.

    Nothing it has started outlives it: what a sanitizer or pytest-xdist leaves behind would go on computing on the
    GPU beside later stages."""
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(
            words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | (env or {}), process_group=0
        )
        try:
            process.wait(seconds)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        file.seek(0)
        text = file.read()
    print(text, file=sys.stderr)
    return text, ended


def outcomes(text: str) -> Counter[str]:
    """PASSED, FAILED, ERROR, SKIPPED -> cases, from the lines that `pytest -v` writes as it goes."""
    found: Counter[str] = Counter()
    for line in text.splitlines():
        if match := _PROGRESS.match(line):
            found[match[1] or match[2]] += 1
    return found


def failures(text: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)


def op_cases(place: Place, name: str, seconds: float) -> int:
    text, ended = run(pytest_words(SELECTIONS[name], place.sized(6, 1)), seconds)
    counts = outcomes(text)
    ran = sum(counts.values()) - counts["SKIPPED"]
    note = "" if ended else "cut off by the time limit"
    if counts["SKIPPED"]:
        note = f"{counts['SKIPPED']} skipped"
    place.results.tell(
        f"op cases, {name}", counts["PASSED"], "passed", share=counts["PASSED"] / ran if ran else None, of="cases run",
        aim=None if place.is_dry else 1.0, note=note,
    )  # fmt: skip
    for case in failures(text)[:5]:
        place.results.tell("failed case", case.rpartition("/")[2])
    found = counts["SKIPPED"] if place.is_dry else counts["PASSED"]
    return 0 if found and counts["PASSED"] + counts["SKIPPED"] == sum(counts.values()) else 1


def sanitized(place: Place, tool: str, seconds: float) -> int:
    """compute-sanitizer over SMALL; it sums up at its end, and what it said before a cut counts too. Every tensor is
    an allocation of its own: torch's pool would hide what is past its end."""
    words = pytest_words(SMALL, 1)
    if place.is_dry:
        text, _ = run(words, seconds)
        place.results.tell(tool, outcomes(text)["SKIPPED"], "cases", note="not run")
        return 0 if outcomes(text)["SKIPPED"] else 1
    sanitizer = shutil.which("compute-sanitizer") or SANITIZER
    if not Path(sanitizer).is_file():
        place.results.tell(tool, "not run", note="there is no compute-sanitizer here")
        return 0
    words = [sanitizer, "--tool", tool, *OPTIONS[tool], "--target-processes", "all", "--print-limit", "20", *words]
    text, ended = run(words, seconds, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
    errors = len(re.findall(r"^=+ (?:Invalid|Misaligned|Out-of-|Race reported|Error: )", text, re.MULTILINE))
    errors = max(errors, sum(map(int, re.findall(r"SUMMARY: (\d+) (?:error|hazard)", text))))
    counts = outcomes(text)
    failed = counts["FAILED"] + counts["ERROR"]
    note = f"{counts['PASSED']} cases passed, {failed} failed{'' if ended else ', cut off'}"
    clean = errors == 0 and counts["PASSED"] > 0 and failed == 0
    place.results.tell(tool, errors, "errors", share=float(clean), of="what must be clean", aim=1.0, note=note)
    return int(not clean)


def main() -> int:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # the time is up: end what was started, too
    name, seconds = sys.argv[1], float(sys.argv[3])
    place = open_place(name, __doc__, sys.argv[4:])
    return op_cases(place, name, seconds) if name in SELECTIONS else sanitized(place, name, seconds)


if __name__ == "__main__":
    sys.exit(main())
