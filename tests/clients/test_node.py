"""Node's clients: the openai package and the Vercel AI SDK (@ai-sdk/openai-compatible), one process per subject.

PAGEMILL_NODE_MODULES names a node_modules folder with the packages of package.json (`npm install --prefix DIR`).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.conftest import KEY, MODEL

HERE = Path(__file__).parent
MODULES = os.environ.get("PAGEMILL_NODE_MODULES")


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.skipif(MODULES is None, reason="PAGEMILL_NODE_MODULES does not name the packages of package.json")
@pytest.mark.parametrize("subject", ["completions", "chat", "responses", "errors", "vercel"])
def test_node(subject: str, v1: str, tmp_path: Path) -> None:
    assert MODULES is not None
    (tmp_path / "node_modules").symlink_to(Path(MODULES).resolve(), target_is_directory=True)
    shutil.copy(HERE / "clients.mjs", tmp_path)
    done = subprocess.run(
        ["node", "--preserve-symlinks", "clients.mjs", subject],
        cwd=tmp_path,
        env={**os.environ, "BASE_URL": v1, "API_KEY": KEY, "MODEL": MODEL},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
