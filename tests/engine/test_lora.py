"""Reading adapters: peft's rules for ranks and scales, and a sentence for everything that is not served."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import Adapter, StartError
from engine.models import lora
from engine.models.lora import LayerShape, read_adapter
from tests.engine.adapters import PREFIX, added, write_adapter

Q, V, UP = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj"
SHAPES = {Q: LayerShape(24, 16), V: LayerShape(8, 16), UP: LayerShape(40, 16)}


def product(adapter: Adapter, path: str, shapes: dict[str, LayerShape] = SHAPES) -> Tensor:
    read = read_adapter(adapter, shapes, torch.float32)[path]
    return read.b.double() @ read.a.double()


def test_reads_what_was_written(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES)
    expected = added(adapter)
    assert set(read_adapter(adapter, SHAPES, torch.float32)) == set(SHAPES) == set(expected)
    for path in SHAPES:
        assert torch.allclose(product(adapter, path), expected[path], atol=1e-6)
    assert read_adapter(adapter, SHAPES, torch.bfloat16)[Q].a.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("config", "ranks", "scales"),
    [
        ({}, {}, {Q: 2.0, V: 2.0, UP: 2.0}),
        ({"use_rslora": True}, {}, {Q: 4.0, V: 4.0, UP: 4.0}),
        ({"use_rslora": 1}, {}, {Q: 4.0, V: 4.0, UP: 4.0}),
        ({"rank_pattern": {"q_proj": 16}}, {Q: 16}, {Q: 0.5, V: 2.0, UP: 2.0}),
        ({"rank_pattern": {"q_proj": 16}, "use_rslora": True}, {Q: 16}, {Q: 2.0, V: 4.0, UP: 4.0}),
        ({"alpha_pattern": {"q_proj": 16, "_proj": 1, "mlp.up_proj": 2.0}}, {}, {Q: 4.0, V: 2.0, UP: 0.5}),
        ({"alpha_pattern": {r"layers\.\d+\.self_attn\.(q|v)_proj": 4}}, {}, {Q: 1.0, V: 1.0, UP: 2.0}),
        ({"alpha_pattern": {r"^model.layers.0.self_attn.q_proj": 4}}, {}, {Q: 1.0, V: 2.0, UP: 2.0}),
        ({"alpha_pattern": {"v_proj": 4, Q: 12, "model.+": 8}}, {}, {Q: 3.0, V: 1.0, UP: 2.0}),
        (
            {"alpha_pattern": {"_proj|q_proj": 4}, "rank_pattern": {"up_proj": 2, "mlp.up_proj": 3}},
            {UP: 2},
            {Q: 1.0, V: 2.0, UP: 4.0},
        ),
    ],
)
def test_ranks_and_scales_go_by_pefts_rules(
    config: dict[str, Any], ranks: dict[str, int], scales: dict[str, float], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES, ranks=ranks, **config)
    expected = added(adapter, scales)
    for path in SHAPES:
        assert torch.allclose(product(adapter, path), expected[path], atol=1e-5), path


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|v|up)_proj", [Q, "v_proj", "mlp.up_proj"]])
def test_targets_may_be_a_pattern_or_longer_names(targets: Any, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES, target_modules=targets)
    assert len(read_adapter(adapter, SHAPES, torch.float32)) == 3


def test_targets_that_the_model_does_not_have_or_that_are_excluded_are_none(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES, target_modules=["q_proj", "v_proj", "up_proj", "query_key_value"])
    assert set(read_adapter(adapter, SHAPES, torch.float32)) == set(SHAPES)
    without = {path: shape for path, shape in SHAPES.items() if path != V}
    targets = ["q_proj", "v_proj", "up_proj"]
    adapter = write_adapter(tmp_path / "b", without, target_modules=targets, exclude_modules=["v_proj"])
    assert set(read_adapter(adapter, SHAPES, torch.float32)) == set(without)


@pytest.mark.parametrize("frame", ["layers", "language_model.model.layers", "model.language_model.layers"])
def test_adapters_of_other_frames_of_the_model_fit(frame: str, tmp_path: Path) -> None:
    shapes = {path.replace("model.layers", frame): shape for path, shape in SHAPES.items()}
    adapter = write_adapter(tmp_path / "a", shapes)
    expected = added(adapter)
    for path in SHAPES:
        got = product(adapter, path)
        assert torch.allclose(got, expected[path.replace("model.layers", frame)], atol=1e-6)


def test_some_layers_alone_may_be_changed(tmp_path: Path) -> None:
    more = {path.replace(".0.", f".{n}.").replace(".1.", f".{n}."): s for path, s in SHAPES.items() for n in range(3)}
    only = {path: shape for path, shape in more.items() if ".1." in path}
    adapter = write_adapter(tmp_path / "a", only, layers_to_transform=[1])
    assert set(read_adapter(adapter, more, torch.float32)) == set(only)
    for wanted, layers in (("layers_to_transform", 2), ("lacks the tensors", None)):
        adapter = write_adapter(tmp_path / "a", only, layers_to_transform=layers)
        with pytest.raises(StartError, match=wanted):
            read_adapter(adapter, more, torch.float32)
    adapter = write_adapter(tmp_path / "a", only, exclude_modules=r".*layers\.[02].*")
    assert set(read_adapter(adapter, more, torch.float32)) == set(only)


def test_no_list_of_layers_means_all(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES, layers_to_transform=[])
    assert set(read_adapter(adapter, SHAPES, torch.float32)) == set(SHAPES)


def test_patterns_as_people_write_them_are_quick_enough(tmp_path: Path) -> None:
    patterns = {
        r"layers\.(0|1|2|3|4|5|6|7|8|9|10|11|12|13|14|15)\.self_attn\.(q|k|v|o)_proj": 4,
        r"(?:model\.)?layers\.\d+\.mlp\.(?:gate|up|down)_proj": 4,
        r".*\.layers\..*(q|v)_proj.*": 4,
        **{f"model.layers.{n}.mlp.{name}_proj": 4 for n in range(80) for name in ("gate", "up", "down")},
    }
    adapter = write_adapter(tmp_path / "a", SHAPES, alpha_pattern=patterns)
    assert torch.allclose(product(adapter, UP), added(adapter, dict.fromkeys(SHAPES, 1.0))[UP], atol=1e-6)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"peft_type": None}, "peft_type"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"lora_bias": True}, "lora_bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"kasa_config": {"beta": 1}}, "kasa_config"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"r": 0}, "r is 0"),
        ({"r": 2.0}, "r is 2.0"),
        ({"r": True}, "r is True"),
        ({"r": 10**9}, "r is 1000000000"),
        ({"r": 5}, "has the shape"),
        ({"lora_alpha": "8"}, "lora_alpha is '8'"),
        ({"lora_alpha": None}, "lora_alpha is None"),
        ({"lora_alpha": 1e30}, "lora_alpha is 1e"),
        ({"lora_alpha": math.nan}, "lora_alpha is nan"),
        ({"target_modules": []}, "target_modules"),
        ({"target_modules": None}, "target_modules"),
        ({"target_modules": [3]}, "target_modules"),
        ({"target_modules": ["q_proj", "v_proj"]}, "up_proj, which target_modules"),
        ({"layers_to_transform": "1"}, "layers_to_transform"),
        ({"layers_to_transform": [True]}, "layers_to_transform"),
        ({"rank_pattern": {"q_proj": 5}}, "has the shape"),
        ({"rank_pattern": {"q_proj": "4"}}, "rank_pattern is '4'"),
        ({"rank_pattern": ["q_proj"]}, "rank_pattern"),
        ({"alpha_pattern": {"(a+)+b": 4}}, "may take long"),
        ({"alpha_pattern": {"(a|aa)*": 4}}, "may take long"),
        ({"alpha_pattern": {"(?x:([\\w.]+) +)!": 4}}, "may take long"),
        ({"rank_pattern": {"(?x)(a+) +b": 4}}, "may take long"),
        ({"alpha_pattern": {".*.*.*.*x": 4}}, "may take long"),
        ({"alpha_pattern": {"a" * 201: 4}}, "may take long"),
        ({"rank_pattern": {f"layer{n}": 4 for n in range(4097)}}, "has 4097 patterns"),
        ({"target_modules": [f"layer{n}" for n in range(4097)]}, "has 4097 names"),
        ({"alpha_pattern": {".?" * 90 + "x": 4}}, "may take long"),
        ({"alpha_pattern": {"(|.)" * 45 + "x": 4}}, "may take long"),
        ({"alpha_pattern": {f".*.*.*{i}x": 4 for i in range(100)}}, "may take long"),
        ({"alpha_pattern": {"(q_proj": 4}}, "which is none"),
    ],
)
def test_what_would_compute_something_else_is_refused(config: dict[str, Any], said: str, tmp_path: Path) -> None:
    refused(write_adapter(tmp_path / "a", SHAPES, **config), said)


def refused(adapter: Adapter, said: str) -> None:
    with pytest.raises(StartError) as caught:
        read_adapter(adapter, SHAPES, torch.float32)
    message = str(caught.value)
    assert said in message
    assert repr(adapter.name) in message
    assert message.endswith(".")
    assert "\n" not in message


def changed(rewrite: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], None]:
    """The adapter's tensors, rewritten."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        rewrite(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return change


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def long_header(path: Path) -> None:
    """Of a file without tensors."""
    header = b'{"__metadata__":{"x":"' + b"x" * lora.MAX_HEADER + b'"}}'
    path.write_bytes(struct.pack("<Q", len(header)) + header)


A_OF_Q, B_OF_Q = f"{PREFIX}{Q}.lora_A.weight", f"{PREFIX}{Q}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (changed(lambda t: t[A_OF_Q].fill_(math.inf)), "not finite"),
        (changed(lambda t: t[B_OF_Q][3].fill_(math.nan)), "not finite"),
        (changed(lambda t: t[B_OF_Q].fill_(3e38)), "not finite"),
        (changed(lambda t: t.update({A_OF_Q: t[A_OF_Q].double()})), "has the type float64"),
        (changed(lambda t: t.update({A_OF_Q: t[A_OF_Q].to(torch.int8)})), "has the type int8"),
        (changed(lambda t: t.update({A_OF_Q: torch.zeros(4, 17)})), "has the shape [4, 17]"),
        (changed(lambda t: t.update({B_OF_Q: torch.zeros(25, 4)})), "has the shape [25, 4]"),
        (changed(lambda t: t.update({B_OF_Q: torch.zeros(24)})), "has the shape [24]"),
        (changed(lambda t: t.pop(B_OF_Q)), "one lora_A and one lora_B"),
        (changed(lambda t: [t.pop(A_OF_Q), t.pop(B_OF_Q)]), f"lacks the tensors for {Q}"),
        (changed(lambda t: t.update({f"{PREFIX}lm_head.lora_A.weight": torch.zeros(4, 16)})), "changes lm_head"),
        (
            changed(lambda t: t.update({f"{PREFIX}{Q}.lora_magnitude_vector": torch.ones(24)})),
            "no lora_A",
        ),
        (changed(lambda t: t.update({f"{PREFIX}model.embed_tokens.lora_embedding_A": torch.zeros(4, 9)})), "embed_to"),
        (changed(lambda t: t.update({A_OF_Q.removeprefix(PREFIX): t[A_OF_Q].clone()})), "twice"),
        (changed(lambda t: t.update({A_OF_Q.replace("model.layers", "layers"): t[A_OF_Q].clone()})), "lora_A and"),
        (changed(lambda t: t.clear()), "holds no tensors"),
        (lambda f: (f / "adapter_model.safetensors").write_bytes(b"\x80\x02}q\x00."), "is not a readable safetensors"),
        (lambda f: (f / "adapter_model.safetensors").rename(f / "adapter_model.bin"), "adapter_model.bin is pickled"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "no adapter_model.safetensors"),
        (lambda f: (f / "adapter_config.json").unlink(), "no adapter_config.json"),
        (lambda f: [(f / "adapter_config.json").unlink(), os.mkfifo(f / "adapter_config.json")], "no adapter_config"),
        (lambda f: (f / "adapter_config.json").write_text("[]"), "holds no JSON object"),
        (lambda f: (f / "adapter_config.json").write_text("{" * 100_000), "Cannot read"),
        (lambda f: (f / "adapter_config.json").write_text(" " * (1 << 20) + "{}"), "has 1048578 bytes"),
        (lambda f: replaced(f / "adapter_config.json", os.mkfifo), "no adapter_config.json"),
        (lambda f: replaced(f / "adapter_config.json", lambda p: p.symlink_to("/dev/zero")), "no adapter_config.json"),
        (lambda f: replaced(f / "adapter_config.json", Path.mkdir), "no adapter_config.json"),
        (lambda f: replaced(f / "adapter_model.safetensors", os.mkfifo), "no adapter_model.safetensors"),
        (lambda f: replaced(f / "adapter_model.safetensors", long_header), "its header has"),
        (lambda f: f.rename(f.parent / "elsewhere"), "no such folder"),
    ],
)
def test_a_broken_or_hostile_folder_is_a_sentence(change: Callable[[Path], Any], said: str, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES)
    change(tmp_path / "a")
    with pytest.raises(StartError) as caught:
        read_adapter(adapter, SHAPES, torch.float32)
    assert said in str(caught.value)
    assert str(caught.value).endswith(".")


def test_names_that_nobody_can_look_for_are_a_sentence(tmp_path: Path) -> None:
    refused(Adapter("a", str(tmp_path / "x") + "\0"), "")
    refused(Adapter("a", "~nobody-of-this-name/x"), "")
    refused(Adapter("a", "x" * 5000), "")


def test_what_memory_does_not_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES)
    numbers = sum(shape.in_features + shape.out_features for shape in SHAPES.values())
    needed = 4 * (32 + 4) * numbers  # packed, and of rank 4 as read
    monkeypatch.setattr(lora, "available_memory", lambda: needed)
    read_adapter(adapter, SHAPES, torch.float32)
    monkeypatch.setattr(lora, "available_memory", lambda: needed - 1)
    refused(adapter, "of memory is available")
    wide = SHAPES | {Q: LayerShape(24, 16, joined=72)}  # two thirds of what is served are zeros
    monkeypatch.setattr(lora, "available_memory", lambda: needed + 4 * 32 * 48 - 1)
    with pytest.raises(StartError, match="of memory is available"):
        read_adapter(adapter, wide, torch.float32)


def test_the_rules_are_those_of_the_file(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", SHAPES, fan_in_fan_out=True, inference_mode=True, lora_dropout=0.1)
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"field_of_tomorrow": 3, "task_type": "CAUSAL_LM"}))
    assert len(read_adapter(adapter, SHAPES, torch.float32)) == 3
