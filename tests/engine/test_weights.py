"""Weights from folders and GGUF files, and a cache that is never believed further than it can be checked."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.config import StartError
from engine.models import gguf_tensors, weights
from engine.models.safetensors_files import INDEX_FILE
from engine.models.source import Source, resolve_source
from engine.models.weights import Weights, open_weights
from engine.tokenizer_files import open_tokenizer
from tests.engine.gguf_writing import as_gguf, metadata_of, tiny_model
from tests.engine.vocabularies import byte_level
from tests.models import MODELS, model_file

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12, dtype=torch.float32).view(3, 4) / 7,
    "model.norm.weight": torch.ones(4, dtype=torch.bfloat16),
    "lm_head.weight": torch.full((3, 4), 0.3, dtype=torch.float16),
}
CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "eos_token_id": 2}


def folder(parent: Path, *, shards: int = 1, config: dict[str, Any] | None = None) -> Path:
    """A model folder with TENSORS in one file, or one per shard with an index."""
    path = parent / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    if shards == 1:
        save_file(TENSORS, path / "model.safetensors")
        return path
    weight_map = {}
    for number, name in enumerate(TENSORS):
        weight_map[name] = f"model-{number % shards + 1:05d}-of-{shards:05d}.safetensors"
    for file in set(weight_map.values()):
        save_file({name: TENSORS[name] for name in TENSORS if weight_map[name] == file}, path / file)
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def opened(path: Path, **options: Any) -> Weights:
    return open_weights(resolve_source(str(path)), cache_dir=str(path.parent / "cache"), **options)


def equal(got: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> bool:
    return got.keys() == expected.keys() and all(
        got[name].dtype == dtype and torch.equal(got[name], value.to(dtype)) for name, value in expected.items()
    )


# ---- folders


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder(shards: int, dtype: torch.dtype, tmp_path: Path) -> None:
    found = opened(folder(tmp_path, shards=shards))
    assert found.hf_config == CONFIG
    assert found.generation_config == {}
    assert (found.architecture, found.num_parameters, found.is_dummy) == ("LlamaForCausalLM", 28, False)
    assert found.shapes == {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}
    assert equal(dict(found.tensors(dtype)), TENSORS, dtype)


def test_content_hash_follows_the_content(tmp_path: Path) -> None:
    path = folder(tmp_path)
    before = opened(path).content_hash
    assert opened(path).content_hash == before
    save_file({name: tensor + 1 for name, tensor in TENSORS.items()}, path / "model.safetensors")
    after = opened(path).content_hash
    assert after != before
    (path / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-3}))
    assert opened(path).content_hash not in (before, after)


def test_generation_config(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "generation_config.json").write_text('{"temperature": 0.2}')
    assert opened(path).generation_config == {"temperature": 0.2}


def test_dummy_weights(tmp_path: Path) -> None:
    path = folder(tmp_path)
    found = opened(path, load_format="dummy")
    assert (found.is_dummy, found.shapes, found.hf_config) == (True, {}, CONFIG)


def break_json(path: Path) -> None:
    (path / "config.json").write_text("{")


def ask_for_code(path: Path) -> None:
    (path / "config.json").write_text(json.dumps(CONFIG | {"auto_map": {"AutoModel": "x.Model"}}))


def cut_short(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[:-3])


def cut_header(path: Path) -> None:
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:40])


def empty(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"")


def foreign(path: Path) -> None:
    (path / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(200))


def overlapping(path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def wrong_shape(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))


def odd_header(path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": "x"}}).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_json, "Cannot read .*config.json"),
        (ask_for_code, "auto_map"),
        (cut_short, "cut short"),
        (cut_header, "header is cut short"),
        (empty, "header is cut short"),
        (foreign, "not a readable safetensors file"),
        (overlapping, "side by side"),
        (wrong_shape, "does not fit its bytes"),
        (odd_header, "header is broken"),
    ],
)
def test_a_damaged_folder_is_one_sentence(damage: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    path = folder(tmp_path)
    damage(path)
    with pytest.raises(StartError, match=message) as caught:
        opened(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../../etc/secret.safetensors"}, "not a .safetensors file in its folder"),
        ({"a": "/etc/secret.safetensors"}, "not a .safetensors file in its folder"),
        ({"a": "weights.bin"}, "not a .safetensors file in its folder"),
        ({"a": "absent.safetensors"}, "absent.safetensors is missing"),
        ({"a": "model.safetensors"}, "no file has the tensor a"),
        ({"a": 5}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_lies(weight_map: Any, message: str, tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(StartError, match=message):
        opened(path)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    path = folder(tmp_path, shards=2)
    (path / INDEX_FILE).unlink()
    save_file({"lm_head.weight": torch.zeros(3, 4)}, path / "more.safetensors")
    with pytest.raises(StartError, match=r"lm_head\.weight in two files"):
        opened(path)


def test_load_format_must_fit(tmp_path: Path) -> None:
    path = folder(tmp_path)
    with pytest.raises(StartError, match="load-format"):
        open_weights(Source("m", str(path), "folder", path), load_format="gguf")
    gguf = Source("m", "x.gguf", "gguf", tmp_path / "x.gguf")
    with pytest.raises(StartError, match="load-format"):
        open_weights(gguf, load_format="safetensors")


def test_the_tokenizer_of_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path)
    source = resolve_source(str(path))
    with pytest.raises(StartError, match=r"no tokenizer\.json\.$"):
        open_tokenizer(source, hf_config=CONFIG, generation_config={})
    (path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(StartError, match=r"only tokenizer\.model: write one"):
        open_tokenizer(source, hf_config=CONFIG, generation_config={})
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="Cannot read"):
        open_tokenizer(source, hf_config=CONFIG, generation_config={})
    backend = byte_level()._with_control
    backend.enable_truncation(3)  # left behind by somebody's training run
    backend.save(str(path / "tokenizer.json"))
    settings = {
        "bos_token": {"content": "<|start|>"},
        "eos_token": "<|end|>",
        "add_bos_token": True,
        "chat_template": [{"name": "default", "template": "old"}, {"name": "tool_use", "template": "tools"}],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text("new")
    tokenizer = open_tokenizer(source, hf_config=CONFIG, generation_config={"eos_token_id": [9]})
    assert tokenizer.eos_token_ids == (9, 2, 0)
    assert tokenizer.bos_token_id == 1
    assert dict(tokenizer.chat_templates) == {"default": "new", "tool_use": "tools"}
    assert tokenizer.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    ids = tokenizer.encode("hello")
    assert (1 in ids, tokenizer.decode(ids)) == (False, "hello")  # the post-processor decides, and there is none
    byte_level(adds_bos=True)._with_control.save(str(path / "tokenizer.json"))
    with_bos = open_tokenizer(source, hf_config=CONFIG, generation_config={})
    assert with_bos.encode("hello") == with_bos.encode("<|start|>hello", allow_special=True) == [1, *ids]


# ---- GGUF files and their cache


@pytest.fixture
def gguf(tmp_path: Path) -> tuple[Path, dict[str, Tensor]]:
    _, parameters = tiny_model("qwen2")
    return as_gguf(tmp_path / "m.gguf", "qwen2", parameters, metadata_of("qwen2")), parameters


def cached_files(path: Path) -> list[Path]:
    return sorted((path.parent / "cache" / "gguf").glob("*/*.safetensors"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_start_maps_what_the_first_derived(
    gguf: tuple[Path, dict[str, Tensor]], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parameters = gguf
    assert equal(dict(opened(path).tensors(dtype)), parameters, dtype)
    (file,) = cached_files(path)
    assert not list(file.parent.glob("*.part"))

    def derive_again(*_: Any) -> Tensor:
        raise AssertionError("derived twice")

    monkeypatch.setattr(gguf_tensors, "parameter", derive_again)
    assert equal(dict(opened(path).tensors(dtype)), parameters, dtype)


def flip_a_byte(file: Path) -> None:
    time.sleep(0.02)  # file times move in steps of a few milliseconds
    data = bytearray(file.read_bytes())
    data[-5] ^= 0xFF
    file.write_bytes(data)


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def truncate_with_seal(file: Path) -> None:
    truncate(file)
    weights._seal(file)


def other_shapes(file: Path) -> None:
    save_file({"a": torch.zeros(2)}, file)
    weights._seal(file)


def lose_the_seal(file: Path) -> None:
    file.with_suffix(".json").unlink()


def break_the_seal(file: Path) -> None:
    file.with_suffix(".json").write_text("{")


@pytest.mark.parametrize(
    "damage", [flip_a_byte, truncate, truncate_with_seal, other_shapes, lose_the_seal, break_the_seal]
)
def test_a_damaged_cache_is_rebuilt(gguf: tuple[Path, dict[str, Tensor]], damage: Callable[[Path], None]) -> None:
    path, parameters = gguf
    first = list(opened(path).tensors(torch.float32))
    del first
    (file,) = cached_files(path)
    damage(file)
    assert equal(dict(opened(path).tensors(torch.float32)), parameters, torch.float32)
    assert cached_files(path) == [file]
    assert weights._is_sealed(file)


def test_another_file_in_the_same_place_has_a_cache_of_its_own(gguf: tuple[Path, dict[str, Tensor]]) -> None:
    path, parameters = gguf
    list(opened(path).tensors(torch.float32))
    changed = {name: value + 1 for name, value in parameters.items()}
    path.unlink()
    as_gguf(path, "qwen2", changed, metadata_of("qwen2"))
    assert equal(dict(opened(path).tensors(torch.float32)), changed, torch.float32)
    assert len(cached_files(path)) == 2


def test_writing_to_a_tensor_leaves_the_cache_alone(gguf: tuple[Path, dict[str, Tensor]]) -> None:
    path, parameters = gguf
    for _, tensor in opened(path).tensors(torch.float32):
        tensor.fill_(9.0)
    assert equal(dict(opened(path).tensors(torch.float32)), parameters, torch.float32)


def test_a_full_disk_falls_back_to_memory(
    gguf: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, parameters = gguf

    def no_room(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_room)
    with caplog.at_level(logging.WARNING):
        assert equal(dict(opened(path).tensors(torch.float32)), parameters, torch.float32)
    assert "No space left" in caplog.text
    assert not cached_files(path)
    assert not list((path.parent / "cache").rglob("*.part"))


def test_the_last_gigabyte_of_a_disk_is_left_alone(
    gguf: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, parameters = gguf
    usage = shutil.disk_usage(path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1 << 30))
    with caplog.at_level(logging.WARNING):
        assert equal(dict(opened(path).tensors(torch.float32)), parameters, torch.float32)
    assert "1.1 GB free" in caplog.text
    assert not cached_files(path)


def test_what_a_killed_process_left_is_removed(gguf: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = gguf
    list(opened(path).tensors(torch.float32))
    (file,) = cached_files(path)
    old, fresh = (file.with_name(f"{file.name}.{name}.part") for name in ("old", "fresh"))
    for part in (old, fresh):
        part.write_bytes(b"x")
    os.utime(old, (0, 0))
    file.unlink()
    list(opened(path).tensors(torch.float32))
    assert (old.exists(), fresh.exists()) == (False, True)


def test_a_cache_that_cannot_be_made_falls_back_to_memory(
    gguf: tuple[Path, dict[str, Tensor]], caplog: pytest.LogCaptureFixture
) -> None:
    path, parameters = gguf
    (path.parent / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert equal(dict(opened(path).tensors(torch.float32)), parameters, torch.float32)
    assert "next start takes longer" in caplog.text


def test_a_hash_file_with_nonsense_is_not_believed(gguf: tuple[Path, dict[str, Tensor]]) -> None:
    path, _ = gguf
    good = opened(path).content_hash
    (remembered,) = (path.parent / "cache" / "hashes").iterdir()
    for nonsense in ("", "zz", "ab" * 31):
        remembered.write_text(nonsense)
        assert opened(path).content_hash == good
    assert remembered.read_text() == good


@pytest.mark.model
@pytest.mark.parametrize("name", sorted(MODELS))
def test_real_models(name: str) -> None:
    found = open_weights(resolve_source(str(model_file(name))))
    expected = {"smollm2": (134_515_008, "LlamaForCausalLM"), "gemma3": (268_098_176, "Gemma3ForCausalLM")}
    assert (found.num_parameters, found.architecture) == expected[name]
    norm = dict(found.tensors(torch.float32))["model.norm.weight"]
    assert torch.isfinite(norm).all()
    assert norm.shape == (found.hf_config["hidden_size"],)
