"""config/*.toml are settings that load, agree with each other, and are what the deployments use."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from engine.outputs import Phase
from server import settings
from tests.deploy.tools import ROOT
from tests.server.process import stub_server

PROFILES = sorted(path.name for path in (ROOT / "config").glob("*.toml"))


def table(name: str) -> dict[str, object]:
    return tomllib.loads((ROOT / "config" / name).read_text("utf-8"))


def test_the_profiles_are_all_here() -> None:
    assert PROFILES == ["cpu.toml", "default.toml", "h200.toml"]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_loads_and_every_line_of_it_takes_effect(name: str) -> None:
    loaded = settings.load({}, ROOT / "config" / name)
    loaded.engine_config()  # values that contradict each other are refused here
    for key, value in table(name).items():
        assert getattr(loaded, key) == value
    assert table(name)


@pytest.mark.parametrize("name", [name for name in PROFILES if name != "default.toml"])
def test_a_profile_says_only_what_differs_from_the_defaults(name: str) -> None:
    defaults = table("default.toml")
    for key, value in table(name).items():
        assert defaults.get(key) != value, key


def test_a_server_starts_with_a_profile_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_CONFIG", str(ROOT / "config" / "cpu.toml"))
    with stub_server(tmp_path / "log") as server:
        server.wait_for(Phase.READY.value)
    assert settings.load({}).max_waiting_requests == table("cpu.toml")["max_waiting_requests"]
