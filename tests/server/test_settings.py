"""Settings: one list of fields, from which flags, environment names and the reference pages derive."""

from __future__ import annotations

import os
import pickle
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig, StartError, StructuredConfig
from server import settings_reference
from server.cli import build_parser
from server.digest import digest_of
from server.setting_kinds import parse_size
from server.settings import (
    Settings,
    SettingsError,
    env_of,
    flag_of,
    load,
    meta,
    set_thread_environment,
    unknown_in_environment,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PAGEMILL_"):
            monkeypatch.delenv(name)


def leaves(config: object, path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields(config):  # type: ignore[arg-type]  # a dataclass instance
        value = getattr(config, field.name)
        if is_dataclass(value):
            found |= leaves(value, f"{path}{field.name}.")
        else:
            found[path + field.name] = value
    return found


def test_every_field_of_the_engine_can_be_set_and_keeps_its_default() -> None:
    """All but what is there for tests, and limits that nobody has had to move."""
    paths = {meta(info)["engine"] for info in Settings.model_fields.values()} - {""}
    fixed = {"model.seed", *(f"structured.{field.name}" for field in fields(StructuredConfig))}
    assert paths == set(leaves(EngineConfig())) - fixed
    assert Settings().engine_config() == EngineConfig()


def test_each_engine_value_arrives_where_it_belongs() -> None:
    settings = load(
        {
            "model": "folder", "dtype": "float32", "max_model_len": "100", "kv_cache_memory": "96MiB",
            "enable_prefix_caching": False, "max_num_seqs": "3", "max_num_batched_tokens": "64", "block_size": "32",
            "cpu_isa": "avx2", "num_threads": "1", "step_timeout": "5", "load_format": "dummy",
        }
    )  # fmt: skip
    values = leaves(settings.engine_config())
    assert values["model.model"] == "folder"
    assert values["model.dtype"] == "float32"
    assert values["model.max_model_len"] == 100
    assert values["model.load_format"] == "dummy"
    assert values["cache.memory_bytes"] == 96 * 2**20
    assert values["cache.enable_prefix_caching"] is False
    assert values["cache.block_size"] == 32
    assert values["scheduler.max_num_seqs"] == 3
    assert values["scheduler.max_num_batched_tokens"] == 64
    assert values["device.cpu_isa"] == "avx2"
    assert values["device.num_threads"] == 1
    assert values["step_timeout_s"] == 5.0


def test_flags_win_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('port = 1\nmax-num-seqs = 2\nhost = "0.0.0.0"\n')
    monkeypatch.setenv("PAGEMILL_PORT", "10")
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQS", "20")
    settings = load({"port": "100"}, file)
    assert (settings.port, settings.max_num_seqs, settings.host) == (100, 20, "0.0.0.0")
    monkeypatch.setenv("PAGEMILL_CONFIG", str(file))
    assert load({}).host == "0.0.0.0"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("67108864", 67108864),
        (512, 512),
        ("96MiB", 96 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("500M", 500 * 10**6),
        ("4 KiB", 4096),
        ("7b", 7),
        ("1tib", 2**40),
    ],
)
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "12q", "1 2", "nan", "0x10", "1.5.5G", None, True])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="must be a size such as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("flags", "begins"),
    [
        ({"port": "x"}, "--port: must be a valid integer"),
        ({"port": "70000"}, "--port: must be less than or equal to 65535, got '70000'"),
        ({"kv_cache_memory": "12q"}, "--kv-cache-memory: must be a size such as"),
        ({"kv_cache_memory": "0"}, "--kv-cache-memory: must be greater"),
        ({"dtype": "int3"}, "--dtype: must be 'auto'"),
        ({"keep_alive": "nan"}, "--keep-alive: must be a finite number"),
        ({"memory_utilization": "1.5"}, "--memory-utilization: "),
        ({"max_num_seqs": "0"}, "--max-num-seqs: "),
        ({"num_threads": "-1"}, "--num-threads: "),
    ],
)
def test_a_bad_flag_is_one_sentence_that_names_it(flags: dict[str, str], begins: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags)
    assert str(caught.value).startswith(begins)
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_a_bad_value_names_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("port = 70000\n")
    with pytest.raises(SettingsError, match=r"^port in .*mine\.toml: "):
        load({}, file)
    monkeypatch.setenv("PAGEMILL_PORT", "tcp://10.0.0.1:80")
    with pytest.raises(SettingsError, match=r"^PAGEMILL_PORT: .*enableServiceLinks.* got 'tcp://10\.0\.0\.1:80'\.$"):
        load({}, file)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("prot = 1\n", "has an unknown setting, 'prot'."),
        ("port = \n", "is not valid TOML"),
        (None, "cannot be read: No such file or directory."),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, content: str | None, sentence: str) -> None:
    file = tmp_path / "mine.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        load({}, file)
    assert sentence in str(caught.value)


def test_variables_that_are_no_settings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PORT", "CONFIG", "SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"PAGEMILL_{name}", "x")
    assert unknown_in_environment() == []
    monkeypatch.setenv("PAGEMILL_MAX_NUM_SEQ", "4")
    monkeypatch.setenv("PAGEMILL_PORTS", "1")
    assert unknown_in_environment() == ["PAGEMILL_MAX_NUM_SEQ", "PAGEMILL_PORTS"]


def test_lists_by_comma_and_by_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    assert load({"served_model_name": ["a", "b,c"]}).served_model_name == ("a", "b", "c")
    monkeypatch.setenv("PAGEMILL_SERVED_MODEL_NAME", "x, y")
    assert load({}).served_model_name == ("x", "y")


def test_an_empty_key_is_refused_and_never_opens_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="--api-key: must not be empty"):
        load({"api_key": [""]})
    monkeypatch.setenv("PAGEMILL_API_KEY", "")
    with pytest.raises(SettingsError, match="PAGEMILL_API_KEY is set but empty"):
        load({})


def test_keys_are_kept_as_digests_and_neither_is_ever_shown() -> None:
    settings = load({"api_key": ["hunter2"]})
    assert settings.key_digests() == [digest := digest_of(b"hunter2")]
    assert b"hunter2" not in pickle.dumps(settings)
    shown = repr(settings) + str(settings) + settings.model_dump_json()
    assert "hunter2" not in shown
    assert digest.hex() not in shown
    assert repr(digest)[2:-1] not in shown
    with pytest.raises(SettingsError, match="--api-key: must be a text, or a list of them"):
        load({"api_key": 7})
    with pytest.raises(SettingsError) as caught:
        load({"api_key": ["hunter2", ""]})
    assert "hunter2" not in str(caught.value)


def test_contradictions_end_as_a_start_error() -> None:
    with pytest.raises(StartError, match="--max-num-batched-tokens"):
        load({"max_num_seqs": "8", "max_num_batched_tokens": "4"}).engine_config()


def test_flags_derive_from_the_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no name is broken over two lines
    flags = {flag_of(name) for name in Settings.model_fields} - {"MODEL"}
    assert 30 <= len(flags) <= 56
    help_text = _serve_help()
    for name, info in Settings.model_fields.items():
        assert flag_of(name) in help_text
        if name != "model":
            assert env_of(name) in help_text
        assert info.description, f"{name} has no description"
    names = (
        "--host --port --api-key --served-model-name --dtype --max-model-len --max-num-seqs --max-num-batched-tokens "
        "--block-size --no-enable-prefix-caching --load-format --generation-config --kv-cache-memory --cpu-isa"
    )
    assert all(flag in help_text for flag in names.split())


def _serve_help() -> str:
    parser = build_parser()
    commands = next(action for action in parser._actions if action.dest == "command")
    text: str = commands.choices["serve"].format_help()
    return text


def test_reference_pages_are_current() -> None:
    again = "run: python -m server.settings_reference"
    assert (ROOT / "docs" / "settings.md").read_text() == settings_reference.settings_page(), again
    assert (ROOT / "config" / "default.toml").read_text() == settings_reference.default_toml(), again


def test_the_shipped_file_says_what_the_defaults_are() -> None:
    assert load({}, ROOT / "config" / "default.toml") == Settings()


def test_thread_variables_leave_the_user_in_charge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"OMP_NUM_THREADS": "7"})
    set_thread_environment(Settings(num_threads=3))
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert os.environ["MKL_NUM_THREADS"] == "3"
    assert os.environ["HF_HUB_DISABLE_TELEMETRY"] == "1"


@pytest.mark.parametrize(("cores", "threads", "sleeps"), [(1, 1, True), (2, 2, True), (3, 2, False), (16, 15, False)])
def test_compute_threads_leave_a_core_where_there_are_more_than_two(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, sleeps: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(os, "environ", {})
    assert Settings().engine_config().device.compute_threads() == threads
    set_thread_environment(Settings())
    assert os.environ["OMP_NUM_THREADS"] == str(threads)
    assert (os.environ.get("OMP_WAIT_POLICY") == "PASSIVE") is sleeps
