"""The coding agents themselves, from npm, against the scripted server: each thinks, calls its shell three times, reads
the results and answers, and every turn prefills only what is new. The server is strict: it knows all that they send.

PAGEMILL_AGENTS names a folder with node_modules/.bin/{claude,codex,opencode}
(`npm install --prefix DIR @anthropic-ai/claude-code @openai/codex opencode-ai`).
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import ROOT, find_command
from tests.clients.script import ANSWER, NUM_CALLS
from tests.server.process import ServerProcess, free_port

AGENTS = os.environ.get("PAGEMILL_AGENTS")
BLOCK = 16  # tokens; a turn may compute again what its predecessor's last block did not fill

pytestmark = pytest.mark.skipif(AGENTS is None, reason="PAGEMILL_AGENTS does not name the agents' npm packages")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    python = find_command("python")
    if python is None:
        pytest.skip("no environment with the server: run `make setup`")
    port = free_port()
    settings = ["served_model_name=demo", "strict_fields=true"]
    command = [python, "-m", "tests.clients.scripted_server", str(port), *settings]
    process = ServerProcess(command, port, tmp_path / "server.log", {"PYTHONPATH": str(ROOT)})
    try:
        process.wait_for("ready")
        yield process
    finally:
        process.end()


def run(program: str, *arguments: str, home: Path, **env: str) -> str:
    """The agent's output. It works in an empty folder and finds no other settings than those written here."""
    assert AGENTS is not None
    work = home / "work"
    work.mkdir()
    done = subprocess.run(
        [str(Path(AGENTS).resolve() / "node_modules/.bin" / program), *arguments],
        cwd=work,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def turns(server: ServerProcess, path: str) -> list[dict[str, Any]]:
    """The log lines of the agent's own requests, without those that only want a title."""
    lines = [json.loads(line) for line in server.log.splitlines() if line.startswith("{")]
    asked = [line for line in lines if line.get("path") == path and line.get("prompt_tokens")]
    assert all(line["status"] == 200 for line in asked)
    longest = max(line["prompt_tokens"] for line in asked)
    return [line for line in asked if line["prompt_tokens"] > longest / 2]


def check_reuse(lines: list[dict[str, Any]]) -> None:
    assert len(lines) == NUM_CALLS + 1
    for before, after in itertools.pairwise(lines):
        assert after["cached_tokens"] >= before["prompt_tokens"] - BLOCK, (before, after)


def test_claude_code(server: ServerProcess, tmp_path: Path) -> None:
    said = run(
        "claude", "-p", "Run three steps.", "--allowedTools", "Bash",
        home=tmp_path, ANTHROPIC_BASE_URL=server.url, ANTHROPIC_API_KEY="sk-x", ANTHROPIC_MODEL="demo",
        ANTHROPIC_SMALL_FAST_MODEL="demo", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    assert ANSWER in said
    check_reuse(turns(server, "/v1/messages"))


def test_codex(server: ServerProcess, tmp_path: Path) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex/config.toml").write_text(
        'model = "demo"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\n'
        f'base_url = "{server.url}/v1"\nwire_api = "responses"\nenv_key = "HERE_KEY"\n'
    )
    said = run(
        "codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Run three steps.",
        home=tmp_path, HERE_KEY="sk-x",
    )  # fmt: skip
    assert ANSWER in said
    check_reuse(turns(server, "/v1/responses"))


def test_opencode(server: ServerProcess, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "here",
        "options": {"baseURL": server.url + "/v1", "apiKey": "sk-x"},
        "models": {"demo": {"name": "demo"}},
    }
    folder = tmp_path / ".config/opencode"
    folder.mkdir(parents=True)
    (folder / "opencode.json").write_text(json.dumps({"provider": {"here": provider}, "model": "here/demo"}))
    said = run("opencode", "run", "Run three steps.", home=tmp_path)
    assert ANSWER in said
    check_reuse(turns(server, "/v1/chat/completions"))
