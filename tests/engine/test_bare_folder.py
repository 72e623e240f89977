"""A folder with nothing but a config.json, served with --load-format dummy: whole requests, by ids and by text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config import StartError
from engine.dummy_tokenizer import dummy_backend
from engine.llm import LLM
from engine.models.source import resolve_source
from engine.sampling_params import SamplingParams
from engine.tokenizer import Tokenizer
from engine.tokenizer_files import open_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 400,
    "max_position_embeddings": 256, "bos_token_id": 300, "eos_token_id": 301, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "bare"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def test_every_text_is_tokens_and_every_token_is_text() -> None:
    tokenizer = Tokenizer(dummy_backend(1000))
    assert tokenizer.vocab_size == 1000
    text = "A text 999, ünïcode \N{SNOWMAN}\n"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([72, 999, 256]) == "H 999 256"
    assert all(tokenizer.token_bytes(token_id) for token_id in range(1000))


def test_a_vocabulary_of_less_than_all_bytes() -> None:
    tokenizer = Tokenizer(dummy_backend(131))
    assert tokenizer.vocab_size == 131
    assert tokenizer.encode("aé") == [97]


def test_a_bare_folder_is_served_with_dummy_weights(folder: Path, tmp_path: Path) -> None:
    with LLM(str(folder), load_format="dummy", dtype="float32", cache_dir=str(tmp_path / "cache")) as model:
        params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        (by_ids,) = model.generate([[5, 399, 17]], params, use_tqdm=False)[0]
        (by_text,) = model.generate("hello", params, use_tqdm=False)[0]
    assert len(by_ids.token_ids) == len(by_text.token_ids) == 8
    assert by_ids.text
    assert all(0 <= token_id < 400 for token_id in by_ids.token_ids)


def test_only_dummy_weights_get_a_dummy_tokenizer(folder: Path) -> None:
    source = resolve_source(str(folder), load_format="dummy")
    made = open_tokenizer(source, hf_config=CONFIG, generation_config={}, may_make_one=True)
    assert (made.vocab_size, made.eos_token_ids) == (400, (301,))
    with pytest.raises(StartError, match=r"has no tokenizer\.json"):
        open_tokenizer(source, hf_config=CONFIG, generation_config={})
    with pytest.raises(StartError, match="no size of the vocabulary"):
        open_tokenizer(source, hf_config={}, generation_config={}, may_make_one=True)


def test_a_tokenizer_in_the_folder_comes_first(folder: Path) -> None:
    dummy_backend(290).save(str(folder / "tokenizer.json"))
    source = resolve_source(str(folder), load_format="dummy")
    found = open_tokenizer(source, hf_config=CONFIG, generation_config={}, may_make_one=True)
    assert found.vocab_size == 290
