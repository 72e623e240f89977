"""schemathesis against /openapi.json: whatever the description allows, and what it forbids, must never end in a 5xx,
and every answer must be one that the description knows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, ROOT, serve

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "unsupported_method", "allow_header_conformance", "ignored_auth",
)  # fmt: skip
SECONDS = 180
EXAMPLES = 40  # per route


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[str]:
    """A server of which no request can ask much."""
    with serve(
        tmp_path / "log",
        "--kv-cache-memory",
        "48MiB",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "4",
        "--max-waiting-requests",
        "4",
    ) as url:
        yield url


def test_the_description_holds(small_server: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(
                str(Path(sys.executable).parent / "schemathesis"),
                "run",
                small_server + "/openapi.json",
                "--header",
                f"Authorization: Bearer {KEY}",
            ),
            *("--checks", ",".join(CHECKS), "--phases", "examples,coverage,fuzzing", "--continue-on-failure"),
            *("--max-time", str(SECONDS), "--max-examples", str(EXAMPLES), "--request-timeout", "60"),
            *("--suppress-health-check", "all", "--generation-database", "none"),
        ],
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "tests.clients.openapi_hooks", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS + 240,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]
