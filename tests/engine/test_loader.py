"""From a folder, a GGUF file or nothing but a config to a loaded model, and every refusal on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig, StartError
from engine.models import self_check
from engine.models.backbone import Backbone
from engine.models.fused import FusedModel
from engine.models.loader import LoadedModel, load_model
from engine.models.self_check import PagedRun
from engine.models.stopwatch import Stopwatch
from engine.models.tree import TreeModel
from engine.progress import Progress
from tests.engine.tiny_configs import CONFIGS, plain_logits, relative, tokens
from tests.models import model_file
from tests.tiny import VOCAB_SIZE, byte_tokenizer, tiny_folder


def load(folder: Path, cache: Path, **options: Any) -> LoadedModel:
    settings = {"dtype": "float32", "cache_dir": str(cache), **options}
    return load_model(ModelConfig(model=str(folder), **settings), DeviceConfig(), backend=NativeAttention())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_folder(tmp_path, "gemma3_text")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_a_folder_becomes_the_model_transformers_loads(folder: Path, cache: Path) -> None:
    model = load(folder, cache)
    ids = tokens(40, vocab_size=VOCAB_SIZE)
    got = PagedRun(model.backbone).step([(0, ids)])[0]
    assert relative(got, plain_logits(AutoModelForCausalLM.from_pretrained(folder), ids)) < 1e-5
    assert model.backbone.batch_invariant
    assert model.backbone.dtype == torch.float32
    assert model.max_position == 1024
    assert model.architecture == "Gemma3ForCausalLM"
    assert model.eos_token_ids == (2,)
    assert model.backbone.num_parameters == sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    phases = {"find", "open", "modelling_code", "build", "weights", "self_check", "pack", "tokenizer"}
    assert set(model.load_seconds) == phases


def test_the_second_start_skips_the_self_check(folder: Path, cache: Path) -> None:
    assert "self_check" in load(folder, cache).load_seconds
    assert "self_check" not in load(folder, cache).load_seconds
    assert "self_check" in load(folder, cache, self_check="always").load_seconds
    assert "self_check" in load(folder, cache, dtype="bfloat16").load_seconds
    assert "self_check" not in load(folder, cache / "other", self_check="never").load_seconds


def test_dummy_weights_are_seeded_and_need_no_weight_file(folder: Path, cache: Path) -> None:
    (folder / "model.safetensors").unlink()
    ids = tokens(10, vocab_size=VOCAB_SIZE)

    def logits(seed: int) -> torch.Tensor:
        model = load(folder, cache, load_format="dummy", seed=seed)
        return PagedRun(model.backbone).step([(0, ids)])[0]

    first = logits(1)
    assert torch.isfinite(first).all()
    assert torch.equal(logits(1), first)
    assert not torch.equal(logits(2), first)


def test_a_missing_tensor_is_named(folder: Path, cache: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(StartError, match=r"lack 1 of .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder, cache)


def test_a_wrong_shape_is_named(folder: Path, cache: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = torch.zeros(7)
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(StartError, match=r"model\.norm\.weight has shape \[7\]"):
        load(folder, cache)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "bloom"}, "does not let its attention be replaced"),
        ({"model_type": "unheard_of"}, "not one this version of transformers knows"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with 'gptq'"),
        ({"layer_types": ["sliding_attention", "conv"]}, "conv"),
    ],
)
def test_a_refused_config_ends_in_one_sentence(
    folder: Path, cache: Path, changes: dict[str, Any], reason: str
) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(StartError, match=reason) as caught:
        load(folder, cache)
    assert "\n" not in str(caught.value)


def test_a_model_the_fused_decoder_fails_is_served_unfused(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever half of the check finds out; here the second, on the real weights."""
    check_real = self_check.check_real

    def failing(backbone: Backbone, expected: torch.Tensor) -> None:
        if isinstance(backbone.model, FusedModel):
            raise StartError("no")
        check_real(backbone, expected)

    monkeypatch.setattr(self_check, "check_real", failing)
    for _ in range(2):
        model = load(folder, cache)
        assert isinstance(model.backbone.model, TreeModel)
        ids = tokens(20, vocab_size=VOCAB_SIZE)
        got = PagedRun(model.backbone).step([(0, ids)])[0]
        assert relative(got, plain_logits(AutoModelForCausalLM.from_pretrained(folder), ids)) < 1e-5


def test_experts_stored_one_by_one_are_fused(tmp_path: Path, cache: Path) -> None:
    """Mixtral's checkpoints and transformers' modules name experts differently."""
    settings = {key: value for key, value in CONFIGS["mixtral"].items() if key != "model_type"}
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **settings), dtype=torch.float32)
    plain.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors")
    assert any("experts.0." in name for name in names)
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    model = load(tmp_path, cache)
    ids = tokens(20)
    logits = PagedRun(model.backbone).step([(0, ids)])[0]
    assert relative(logits, plain_logits(plain.eval(), ids)) < 1e-5
    assert model.backbone.batch_invariant
    later = load(tmp_path, cache)  # straight from the files, where every expert lies apart
    assert "modelling_code" not in later.load_seconds
    assert torch.equal(PagedRun(later.backbone).step([(0, ids)])[0], logits)


class Seen(Progress):
    """phases: each with how far it came, bytes of all there were."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[tuple[str, int, int]] = []

    def enter(self, phase: str) -> None:
        self.phases.append((self.phase, self.done, self.total))
        super().enter(phase)


def test_a_start_tells_how_far_it_is(tmp_path: Path) -> None:
    config = ModelConfig(model=str(tiny_folder(tmp_path, "qwen3")), cache_dir=str(tmp_path / "cache"), dtype="float32")
    for _ in range(2):
        seen = Seen()
        model = load_model(config, DeviceConfig(), backend=NativeAttention(), watch=Stopwatch(seen))
        num_bytes = model.backbone.num_parameters * 4
        assert ("weights", num_bytes, num_bytes) in seen.phases
    assert ("pack", num_bytes, num_bytes) in seen.phases, "the second start goes straight to the fused decoder"
    assert [phase for phase, _, _ in seen.phases] == ["", "find", "open", "weights", "pack"]


def test_a_multimodal_checkpoint_gives_its_language_model(folder: Path, cache: Path) -> None:
    """Nested config and prefixed names, as Gemma 3's bigger models have them; the vision tower is left out."""
    path, file = folder / "config.json", folder / "model.safetensors"
    reference = load(folder, cache)
    path.write_text(json.dumps({"model_type": "gemma3", "text_config": json.loads(path.read_text())}))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "vision_tower.patch.weight": torch.zeros(3)}, file, {"format": "pt"})
    ids = tokens(9, vocab_size=VOCAB_SIZE)
    got = PagedRun(load(folder, cache).backbone).step([(0, ids)])[0]
    assert torch.equal(got, PagedRun(reference.backbone).step([(0, ids)])[0])


@pytest.mark.model
def test_the_demo_model() -> None:
    model = load_model(
        ModelConfig(model=str(model_file("smollm2")), dtype="bfloat16"), DeviceConfig(), backend=NativeAttention()
    )
    assert model.backbone.batch_invariant
    assert model.backbone.num_parameters == 134_515_008
    assert model.max_position == 8192
    run = PagedRun(model.backbone)
    text, piece = "", model.tokenizer.encode("The capital of France is")
    for _ in range(3):
        piece = [int(run.step([(0, piece)])[0][-1].argmax())]
        text += model.tokenizer.decode(piece)
    assert "Paris" in text
