"""The README's examples: they run as they stand there, and what is printed under them is what comes.

Only the address is another, and the server's precision: float32, where the README's was bfloat16. Ids, times and the
fingerprint differ from start to start."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import ServerProcess

pytestmark = pytest.mark.model

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
SHELL = re.findall(r"^ {4}\$ (curl .*?)^ {4}((?:\{\"|\.\.\. ).*?)^(?! {4})", README, re.MULTILINE | re.DOTALL)
AGENTS = ("codex", "opencode")
PYTHON = re.findall(r"^```python\n(.*?)^```\n\n((?: {4}[^\n]*\n)*)", README, re.MULTILINE | re.DOTALL)


def curl(command: str, url: str) -> dict[str, Any]:
    done = subprocess.run(
        ["bash", "-c", re.sub(r"\\\n", " ", command).replace("http://127.0.0.1:8000", url)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def names(value: Any) -> Any:
    """An object's keys, at every depth."""
    if isinstance(value, dict):
        return {key: names(inner) for key, inner in value.items()}
    return [names(inner) for inner in value] if isinstance(value, list) else None


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not here")
def test_curl_gets_what_is_printed(server: ServerProcess) -> None:
    (completion, printed), (city, cut) = SHELL
    answer, told = curl(completion, server.url), json.loads(printed)
    assert names(answer) == names(told)
    for changing in ("id", "created", "system_fingerprint"):
        del answer[changing], told[changing]
    told["usage"]["prompt_tokens_details"] = answer["usage"]["prompt_tokens_details"]  # others may have asked before
    assert answer == told
    (choice,) = curl(city, server.url)["choices"]
    told_content = re.findall(r'"content":("(?:[^"\\]|\\.)*")', cut)[0]
    assert choice["finish_reason"] == "stop"
    assert '"finish_reason":"stop"' in cut
    assert json.loads(choice["message"]["content"]).keys() == json.loads(json.loads(told_content)).keys()


def test_the_sdk_gets_what_is_printed(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {}
    (chat, printed), (responses, printed_then) = PYTHON[:2]
    for source, told in ((chat, printed), (responses, printed_then)):
        exec(source.replace("http://127.0.0.1:8000", server.url), scope)
        assert capsys.readouterr().out == re.sub(r"^ {4}", "", told, flags=re.MULTILINE)


def test_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    """It asks what curl asks above."""
    exec(PYTHON[2][0].replace("LLM()", "LLM(dtype='float32', memory_bytes=32 << 20)"), {})
    told: str = json.loads(SHELL[0][1])["choices"][0]["text"]
    assert capsys.readouterr().out == told + "\n"


def test_the_files_of_agents_can_be_read() -> None:
    lines = [line[4:] for line in README.splitlines() if line.startswith("    ")]
    codex, opencode = (next(i for i, x in enumerate(lines) if x.startswith(f"# {name}, ")) for name in AGENTS)
    provider = tomllib.loads("\n".join(lines[codex + 1 : opencode]))["model_providers"]["here"]
    assert provider["base_url"] == "http://127.0.0.1:8000/v1"
    settings = json.loads("".join(lines[opencode + 1 : opencode + 3]))
    assert settings["provider"]["here"]["options"]["baseURL"] == provider["base_url"]
