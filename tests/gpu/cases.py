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

SHORT = "cuda and (paged_attention or cuda_attention or cuda_linear or cuda_sampler or cache_ops) and not float16"
SELECTIONS = {"short": SHORT, "rest": f"cuda and not ({SHORT})"}
# A case or a few of every kernel: each takes tens of times as long as alone.
KERNELS = (
    "strided_queries or rows_without_keys or many_splits or rows_that_no_16_bytes or workspace_is_for_the_splits or "
    "fused_projection or rotations or rotation_and_cache or copies_every_layer or gather_and_scatter or bad_rows or "
    "peaked_rows or most_likely_ids or batches_with_padding or test_penalties or biases or does_not_know_its_place"
)
SMALL = f"cuda and not float16 and not float32 and ({KERNELS})"
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
