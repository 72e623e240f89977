"""Folders whose config and weights do not belong together: one sentence, refused or logged."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from engine.attention.native import NativeAttention
from engine.config import DeviceConfig, ModelConfig, StartError
from engine.models.loader import load_model
from tests.tiny import tiny_folder


def changed_folder(tmp_path: Path, **changes: Any) -> Path:
    folder = tiny_folder(tmp_path, "llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    return folder


def load(folder: Path, tmp_path: Path) -> None:
    config = ModelConfig(model=str(folder), dtype="float32", cache_dir=str(tmp_path / "cache"))
    load_model(config, DeviceConfig(), backend=NativeAttention())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers"),
        ({"num_hidden_layers": 3}, "lack"),
        ({"num_attention_heads": 0}, "llama"),
        ({"quantization_config": "awq"}, "awq"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"vocab_size": 300}, "shape"),
    ],
)
def test_refused_in_one_sentence(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=says):
        load(changed_folder(tmp_path, **changes), tmp_path)


def test_weights_that_nothing_uses_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "pagemill.engine"):
        load(changed_folder(tmp_path, num_hidden_layers=1), tmp_path)
    assert "9 tensors" in caplog.text
    assert "model.layers.1" in caplog.text
