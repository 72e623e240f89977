"""Every GGUF architecture that is read goes through the native decoder, at its first start and at later ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig, Quantization
from engine.models.fused import FusedModel
from engine.models.loader import LoadedModel, load_model
from engine.models.self_check import PagedRun
from tests.engine.gguf_writing import TOKENS, as_gguf, metadata_of, tiny_model
from tests.engine.test_gguf import CASES
from tests.engine.tiny_configs import tokens

PERMUTED = ("llama", "smollm3", "granite")


def written(folder: Path, case: str, quantisation: GGMLQuantizationType | None = None) -> Path:
    model_type, settings, metadata, norm_offset = CASES[case]
    architecture = case.partition(" ")[0]
    _, parameters = tiny_model(model_type, **settings)
    return as_gguf(
        folder / "model.gguf",
        architecture,
        {name: value * (0.3 if value.dim() > 1 else 1.0) for name, value in parameters.items()},
        metadata_of(architecture, **metadata),
        permuted_heads=(4, 2) if architecture in PERMUTED else None,
        norm_offset=norm_offset,
        quantisation=quantisation,
    )


def load(path: Path, quantization: Quantization = "none") -> LoadedModel:
    config = ModelConfig(
        model=str(path), cache_dir=str(path.parent / "cache"), dtype="float32", quantization=quantization
    )
    return load_model(config, DeviceConfig(), backend=NativeAttention())


def has_experts(case: str) -> bool:
    return "expert_count" in CASES[case][2]


@pytest.mark.parametrize("architecture", sorted(CASES))
def test_every_architecture(architecture: str, tmp_path: Path) -> None:
    path = written(tmp_path, architecture)
    ids = tokens(20, vocab_size=len(TOKENS))
    first, later = load(path), load(path)
    assert "self_check" in first.load_seconds
    assert "modelling_code" not in later.load_seconds
    assert isinstance(first.backbone.model, FusedModel)
    assert (first.backbone.model.decoder is None) == has_experts(architecture)
    assert torch.equal(*(PagedRun(model.backbone).step([(0, ids)])[0] for model in (first, later)))


@pytest.mark.parametrize("architecture", ["phi3", "olmo2", "granite", "qwen2moe", "llama with experts"])
def test_in_their_own_precision(architecture: str, tmp_path: Path) -> None:
    """Phi-3's products are stored joined, the others' are joined on the way. Of experts, each one's part is read."""
    path = written(tmp_path, architecture, GGMLQuantizationType.Q8_0)
    ids = tokens(20, vocab_size=len(TOKENS))
    exact, quantised = load(path), load(path, "auto")
    assert quantised.backbone.quantization == ("float32+int8" if has_experts(architecture) else "int8")
    wanted, got = (PagedRun(model.backbone).step([(0, ids)])[0] for model in (exact, quantised))
    later = PagedRun(load(path, "auto").backbone).step([(0, ids)])[0]
    assert torch.equal(later, got)
    error = float((got - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())
    assert 0 < error < 0.1
