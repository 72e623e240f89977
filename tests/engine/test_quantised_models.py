"""Models served with --quantization: which precision, from which files, and what it costs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig, Quantization, StartError
from engine.memory import size_text
from engine.models import loader
from engine.models.fused import FusedModel
from engine.models.loader import LoadedModel, load_model
from engine.models.self_check import PagedRun
from engine.models.source import resolve_source
from engine.models.weights import open_weights
from tests.engine.gguf_writing import TOKENS, as_gguf, metadata_of, tiny_model
from tests.engine.tiny_configs import CONFIGS, relative, tokens
from tests.models import model_file
from tests.perplexity import loss, passage_of
from tests.tiny import VOCAB_SIZE, byte_tokenizer, tiny_folder

Kind = GGMLQuantizationType


def load(model: Path, cache: Path, quantization: str, **settings: Any) -> LoadedModel:
    options: dict[str, Any] = {"dtype": "float32", "quantization": quantization, "cache_dir": str(cache)} | settings
    return load_model(ModelConfig(model=str(model), **options), DeviceConfig(), backend=NativeAttention())


def logits(model: LoadedModel, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return PagedRun(model.backbone).step([(0, tokens(40, vocab_size=vocab_size))])[0]


@pytest.mark.parametrize(("choice", "served", "error"), [("int8", "int8", 0.1), ("int4", "int4+int8", 0.8)])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text"])
def test_a_folder_is_rounded(kind: str, choice: str, served: str, error: float, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, kind)
    plain = load(folder, tmp_path / "cache", "none")
    models = [load(folder, tmp_path / "cache", choice) for _ in range(2)]
    assert plain.backbone.quantization == "none"
    assert [model.backbone.quantization for model in models] == [served, served]
    assert models[0].backbone.num_parameters == plain.backbone.num_parameters
    assert models[0].backbone.weight_bytes < 0.7 * plain.backbone.weight_bytes
    assert 1e-4 < relative(logits(models[0]), logits(plain)) < error
    assert torch.equal(logits(models[0]), logits(models[1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("choice", ["none", "int8", "int4", "auto"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text"])
def test_the_size_is_known_before_anything_is_read(
    kind: str, choice: Quantization, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path, kind)
    size = load(folder, tmp_path / "cache", choice, dtype=dtype).backbone.weight_bytes
    assert_needs(size, folder, tmp_path / "cache", choice, dtype, monkeypatch)


def assert_needs(
    size: int, model: Path, cache: Path, choice: Quantization, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later start goes with `size` bytes of memory and not with one less."""
    monkeypatch.setattr(loader, "available_memory", lambda: size)
    assert load(model, cache, choice, dtype=dtype).backbone.weight_bytes == size
    monkeypatch.setattr(loader, "available_memory", lambda: size - 1)
    with pytest.raises(StartError, match=rf"weights take {re.escape(size_text(size))}, but only"):
        load(model, cache, choice, dtype=dtype)


def test_a_first_start_needs_room_for_the_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    monkeypatch.setattr(loader, "available_memory", lambda: 1000)
    with pytest.raises(StartError, match="before they are quantised, as a model's first start reads them, but only"):
        load(folder, tmp_path / "cache", "int8")
    with pytest.raises(StartError, match=r"weights take [0-9.]+ KiB, but only 1000 bytes"):
        load(folder, tmp_path / "cache", "none")


@pytest.mark.parametrize("choice", ["int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_embedding_is_quantised_too(choice: Quantization, tied: bool, tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama", tie_word_embeddings=tied)
    model = load(folder, tmp_path / "cache", choice).backbone.model
    assert isinstance(model, FusedModel)
    head, embedding = model._head.packed, model._embedding
    assert (embedding.data_ptr() == head.data_ptr()) == tied
    assert head.shape[2] == embedding.shape[2] == 32 * 34  # 8 bits, whatever the layers have


def test_a_first_start_gives_the_bits_of_a_later_one(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    first = load(folder, tmp_path / "cache", "int8", dtype="bfloat16")
    assert "self_check" in first.load_seconds
    later = load(folder, tmp_path / "cache", "int8", dtype="bfloat16")
    assert "self_check" not in later.load_seconds
    assert torch.equal(logits(first), logits(later))
    assert first.backbone.batch_invariant
    assert later.backbone.batch_invariant


def test_floating_point_has_no_precision_of_its_own(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    model = load(folder, tmp_path / "cache", "auto")
    assert model.backbone.quantization == "none"
    assert torch.equal(logits(model), logits(load(folder, tmp_path / "cache", "none")))


def gguf(folder: Path, kind: Kind | None, model_type: str = "llama") -> Path:
    """Its q and k rows lie as llama.cpp's first rotary kernel wanted them."""
    _, parameters = tiny_model(model_type, tie_word_embeddings=False)
    parameters = {name: value * 0.2 if value.dim() == 2 else value for name, value in parameters.items()}
    permuted = (4, 2) if model_type == "llama" else None
    name = f"{model_type}-{kind.name if kind else 'F32'}.gguf"
    metadata = metadata_of(model_type)
    return as_gguf(folder / name, model_type, parameters, metadata, permuted_heads=permuted, quantisation=kind)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_a_gguf_file_gives_the_same_weights_either_way(kind: str, tmp_path: Path) -> None:
    weights = open_weights(resolve_source(str(gguf(tmp_path, Kind[kind]))), cache_dir=str(tmp_path))
    some = weights.some_tensors(torch.float32)
    assert set(some) == set(weights.shapes)
    for name, tensor in weights.tensors(torch.float32):
        assert torch.equal(some[name], tensor)
        if tensor.dim() == 2:
            own = weights.quantised(name)
            assert own is not None
            assert torch.equal(own.dense(torch.float32), tensor), name


@pytest.mark.parametrize(("kind", "served"), [("Q4_0", "int4"), ("Q4_1", "int4"), ("Q5_1", "int8"), ("Q8_0", "int8")])
def test_a_gguf_file_is_served_in_its_own_precision(
    kind: str, served: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gguf(tmp_path, Kind[kind])
    plain, own = (load(path, tmp_path / "cache", choice) for choice in ("none", "auto"))
    assert own.backbone.quantization == served
    assert_needs(own.backbone.weight_bytes, path, tmp_path / "cache", "auto", "float32", monkeypatch)
    assert relative(logits(own, len(TOKENS)), logits(plain, len(TOKENS))) < 0.1


def test_more_bits_than_the_file_has_change_nothing(tmp_path: Path) -> None:
    path = gguf(tmp_path, Kind.Q4_1)
    own, eight, four = (load(path, tmp_path / "cache", choice) for choice in ("auto", "int8", "int4"))
    assert (own.backbone.quantization, eight.backbone.quantization) == ("int4", "int8")
    assert torch.equal(logits(own, len(TOKENS)), logits(eight, len(TOKENS)))
    assert torch.equal(logits(own, len(TOKENS)), logits(four, len(TOKENS)))


def test_fewer_bits_than_the_file_has_are_rounded(tmp_path: Path) -> None:
    path = gguf(tmp_path, Kind.Q8_0)
    four, plain = (load(path, tmp_path / "cache", choice) for choice in ("int4", "none"))
    assert four.backbone.quantization == "int4+int8"
    assert 0.02 < relative(logits(four, len(TOKENS)), logits(plain, len(TOKENS))) < 0.9


def test_a_gguf_file_of_floating_point(tmp_path: Path) -> None:
    path = gguf(tmp_path, None, "qwen2")
    assert load(path, tmp_path / "cache", "auto").backbone.quantization == "none"
    assert load(path, tmp_path / "cache", "int8").backbone.quantization == "int8"


def test_a_later_start_needs_no_dequantised_weights(tmp_path: Path) -> None:
    path = gguf(tmp_path, Kind.Q8_0)
    first = logits(load(path, tmp_path / "cache", "auto"), len(TOKENS))
    for kept in (tmp_path / "cache" / "gguf").rglob("weights-*"):
        kept.unlink()
    assert torch.equal(logits(load(path, tmp_path / "cache", "auto"), len(TOKENS)), first)
    assert not list((tmp_path / "cache" / "gguf").rglob("weights-*"))


def test_what_the_fused_decoder_does_not_serve_is_refused(tmp_path: Path) -> None:
    settings = {key: value for key, value in CONFIGS["gpt2"].items() if key != "model_type"}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **settings)).save_pretrained(tmp_path)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    for _ in range(2):
        with pytest.raises(StartError, match="--quantization int8 needs the fused decoder") as caught:
            load(tmp_path, tmp_path / "cache", "int8")
        assert "\n" not in str(caught.value)
    assert load(tmp_path, tmp_path / "cache", "auto").backbone.quantization == "none"


def test_without_a_self_check_there_is_no_fused_decoder(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    with pytest.raises(StartError, match="without its self-check"):
        load(folder, tmp_path / "cache", "int4", self_check="never")


def test_dummy_weights_can_be_quantised(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "qwen3")
    model = load(folder, tmp_path / "cache", "int8", load_format="dummy")
    assert model.backbone.quantization == "int8"
    assert logits(model).isfinite().all()


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.parametrize(("name", "served"), [("smollm2", "int4+int8"), ("gemma3", "int4+int8")])
def test_perplexity_is_that_of_bfloat16(name: str, served: str, tmp_path: Path) -> None:
    """0.01 nats are 1 % of perplexity."""
    path = model_file(name)
    plain = load(path, tmp_path, "none", dtype="bfloat16")
    ids = passage_of(plain)
    expected = loss(plain.backbone, ids)
    for choice in ("auto", "int8"):
        model = load(path, tmp_path, choice, dtype="bfloat16")
        assert model.backbone.quantization == (served if choice == "auto" else "int8")
        assert abs(loss(model.backbone, ids) - expected) < 0.01, choice
        assert model.backbone.weight_bytes < plain.backbone.weight_bytes * 0.5
