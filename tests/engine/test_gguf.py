"""GGUF files: headers whole and broken, configs and parameter names against transformers and the gguf package."""

from __future__ import annotations

import contextlib
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from transformers import AutoConfig

from engine.config import StartError
from engine.models.gguf import GgufError, GgufFile
from engine.models.gguf_config import FAMILIES, MIXTURES, generation_config, hf_config
from engine.models.source import resolve_source
from engine.models.tensor_names import MIXTRAL
from engine.models.weights import open_weights
from engine.tokenizer_files import open_tokenizer
from tests.engine.gguf_writing import TOKENS, VOCABULARY, as_gguf, as_in_files, metadata_of, tiny_model, write_gguf

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_EXPERT_COUNTS = {"expert_count": 4, "expert_used_count": 2}

# GGUF architecture, perhaps more -> (transformers model type, further config, metadata, norms stored with 1 added)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], float]] = {
    "llama": ("llama", {"tie_word_embeddings": False, "attention_bias": False}, {}, 0.0),
    "smollm3": ("smollm3", {}, {}, 0.0),
    "granite": (
        "granite",
        {"attention_multiplier": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.25, "logits_scaling": 2.0},
        {"attention.scale": 0.5, "embedding_scale": 3.0, "residual_scale": 0.25, "logit_scale": 2.0},
        0.0,
    ),
    "qwen2": ("qwen2", {}, {}, 0.0),
    "qwen3": ("qwen3", {}, {}, 0.0),
    "olmo2": ("olmo2", {}, {}, 0.0),
    "qwen2moe": (
        "qwen2_moe",
        _EXPERTS | {"shared_expert_intermediate_size": 64, "norm_topk_prob": False},
        _EXPERT_COUNTS,
        0.0,
    ),
    "qwen3moe": ("qwen3_moe", _EXPERTS | {"norm_topk_prob": True}, _EXPERT_COUNTS, 0.0),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, _EXPERT_COUNTS, 0.0),
    "llama with experts": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}, _EXPERT_COUNTS, 0.0),
    "phi3": ("phi3", {"sliding_window": 16}, {"attention.sliding_window": 16}, 0.0),
    "gemma": ("gemma", {}, {}, 1.0),
    "gemma2": (
        "gemma2",
        {"sliding_window": 16, "query_pre_attn_scalar": 8},
        {"attention.sliding_window": 16, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        1.0,
    ),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 16, "query_pre_attn_scalar": 8, "rope_theta": 1e6},
        {"attention.sliding_window": 16, "rope.freq_base": 1e6},
        1.0,
    ),
}


@pytest.mark.parametrize("case", sorted(CASES))
def test_round_trip_of_an_architecture(case: str, tmp_path: Path) -> None:
    model_type, settings, metadata, norm_offset = CASES[case]
    architecture = case.partition(" ")[0]
    config, parameters = tiny_model(model_type, **settings)
    permuted = (4, 2) if architecture in ("llama", "smollm3", "granite") else None
    path = as_gguf(
        tmp_path / "model.gguf",
        architecture,
        parameters,
        metadata_of(architecture, **metadata),
        permuted_heads=permuted,
        norm_offset=norm_offset,
    )
    weights = open_weights(resolve_source(str(path)), cache_dir=str(tmp_path / "cache"))
    parameters = as_in_files(parameters)
    if model_type == "mixtral":
        parameters = {MIXTRAL.theirs(name): value for name, value in parameters.items()}
    got = dict(weights.tensors(torch.float32))
    assert got.keys() == parameters.keys()
    for name, value in parameters.items():
        torch.testing.assert_close(got[name], value, rtol=0, atol=1e-6 if norm_offset else 0, msg=name)
    assert weights.num_parameters == sum(value.numel() for value in parameters.values())
    rebuilt = AutoConfig.for_model(**weights.hf_config)
    for key, value in config.to_dict().items():
        if key not in ("architectures", "dtype", "transformers_version", "pad_token_id", "initializer_range"):
            assert getattr(rebuilt, key) == value, key


def test_every_family_is_tested() -> None:
    assert {case.partition(" ")[0] for case in CASES} == FAMILIES.keys() | MIXTURES.keys()


def test_llama3_positions_are_found_again(tmp_path: Path) -> None:
    factor, half = 32.0, 32
    frequencies = 500000.0 ** (-np.arange(half) / half)
    wavelengths = 2 * np.pi / frequencies
    divisors = np.ones(half)
    for index, wavelength in enumerate(wavelengths):
        if wavelength > 8192 / 1.0:
            divisors[index] = factor
        elif wavelength > 8192 / 4.0:
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            divisors[index] = 1 / ((1 - smooth) / factor + smooth)
    assert 1 < len(set(divisors.tolist())) < half
    fields = metadata_of("llama", **{"attention.key_length": 64, "rope.freq_base": 500000.0})
    tensors = {"token_embd.weight": np.zeros((4, 32), np.float32)}
    write_gguf(tmp_path / "a.gguf", "llama", fields, tensors | {"rope_freqs.weight": divisors.astype(np.float32)})
    assert hf_config(GgufFile(tmp_path / "a.gguf"))["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    divisors[3] = 1.5
    write_gguf(tmp_path / "b.gguf", "llama", fields, tensors | {"rope_freqs.weight": divisors.astype(np.float32)})
    with pytest.raises(GgufError, match="rope_freqs"):
        hf_config(GgufFile(tmp_path / "b.gguf"))


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}, {"rope_type": "linear", "factor": 8.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 64},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ({"rope.scaling.type": "none"}, None),
    ],
)
def test_scaled_positions(metadata: dict[str, Any], expected: dict[str, Any] | None, tmp_path: Path) -> None:
    tensors = {"token_embd.weight": np.zeros((4, 32), np.float32)}
    path = write_gguf(tmp_path / "a.gguf", "qwen2", metadata_of("qwen2", **metadata), tensors)
    assert hf_config(GgufFile(path)).get("rope_scaling") == expected


def test_sampling_values_of_the_file(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata, {"token_embd.weight": np.zeros((4, 32), np.float32)})
    expected = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert generation_config(GgufFile(path)) == expected


def test_quantised_matrices(tmp_path: Path) -> None:
    _, parameters = tiny_model("qwen2")
    kind = GGMLQuantizationType.Q8_0
    path = as_gguf(tmp_path / "q.gguf", "qwen2", parameters, metadata_of("qwen2"), quantisation=kind)
    got = dict(open_weights(resolve_source(str(path)), cache_dir=str(tmp_path)).tensors(torch.float32))
    for name, value in parameters.items():
        step = value.abs().max().item() / 127 if value.dim() == 2 else 0.0
        torch.testing.assert_close(got[name], value, rtol=0, atol=step, msg=name)
        assert torch.equal(got[name], value) == (value.dim() == 1)


# ---- refusals


def small_file(folder: Path, architecture: str = "llama", **more: Any) -> Path:
    tensors = {"token_embd.weight": np.zeros((len(TOKENS), 32), np.float32), "output_norm.weight": np.ones(32, "f4")}
    return write_gguf(folder / "small.gguf", architecture, VOCABULARY | metadata_of(architecture) | more, tensors)


def open_all(path: Path) -> None:
    """Everything that reads a header."""
    source = resolve_source(str(path))
    weights = open_weights(source, cache_dir=str(path.parent / "cache"))
    open_tokenizer(source, hf_config=weights.hf_config, generation_config={}, gguf_metadata=weights.gguf_metadata)


def test_unknown_architectures_are_named(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"'mamba'.*supported: gemma"):
        open_all(small_file(tmp_path, "mamba"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"llama.block_count": "two"}, "no number under llama.block_count"),
        ({"llama.attention.head_count": 0}, "no number under llama.attention.head_count"),
        ({"llama.embedding_length": 1.5}, "no whole number"),
        ({"llama.rope.scaling.type": "strange"}, "'strange'"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "mystery"}, "'mystery'"),
        ({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a x"]}, "vocabulary is broken"),
        ({"tokenizer.ggml.scores": [1.0]}, "more tokens than scores"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "do not match"),
        ({"tokenizer.ggml.unknown_token_id": 10**6}, "vocabulary is broken"),
        ({"tokenizer.ggml.tokens": "no list"}, "no vocabulary"),
    ],
)
def test_broken_metadata_is_one_sentence(more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=message) as caught:
        open_all(small_file(tmp_path, **more))
    assert "\n" not in str(caught.value)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    tensors = {name: np.zeros((4, 32), np.float32) for name in ("token_embd.weight", "blk.0.mystery.weight")}
    path = write_gguf(tmp_path / "a.gguf", "llama", VOCABULARY | metadata_of("llama"), tensors)
    with pytest.raises(StartError, match=r"blk\.0\.mystery\.weight"):
        open_all(path)


@pytest.mark.parametrize(
    ("architecture", "name", "shape", "message"),
    [
        ("gemma", "blk.0.ffn_gate_exps.weight", (4, 8, 32), "not supported for 'gemma'"),
        ("qwen2moe", "blk.0.ffn_up_exps.weight", (4, 8, 32), "not supported for 'qwen2moe'"),
        ("qwen2moe", "blk.0.ffn_gate_exps.weight", (3, 8, 32), "another shape than 4 experts"),
        ("qwen2moe", "blk.0.ffn_gate_exps.weight", (8, 32), "another shape than 4 experts"),
        ("qwen2moe", "blk.0.ffn_down_exps.weight", (8, 32), "none of experts"),
        ("qwen2moe", "blk.0.ffn_down_exps.weight", (5000, 1, 1), "none of experts"),
    ],
)
def test_experts_that_fit_nothing(
    architecture: str, name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    tensors = {"token_embd.weight": np.zeros((len(TOKENS), 32), np.float32)}
    if "down" in name:
        tensors["blk.0.ffn_gate_exps.weight"] = np.zeros((4, 8, 32), np.float32)
    metadata = VOCABULARY | metadata_of(architecture, **_EXPERT_COUNTS)
    path = write_gguf(tmp_path / "a.gguf", architecture, metadata, tensors | {name: np.zeros(shape, np.float32)})
    with pytest.raises(StartError, match=message):
        open_all(path)


def test_a_file_cut_anywhere_is_one_sentence(tmp_path: Path) -> None:
    data = small_file(tmp_path).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 300, 7), *range(300, len(data) - 1, len(data) // 150)]:
        cut.write_bytes(data[:length])
        with pytest.raises(StartError) as caught:
            open_all(cut)
        assert "\n" not in str(caught.value)


def test_random_damage_never_gives_a_traceback(tmp_path: Path) -> None:
    data = small_file(tmp_path).read_bytes()
    header = data.index(b"output_norm.weight") + 60
    generator = random.Random(5)
    damaged = tmp_path / "damaged.gguf"
    unnoticed = 0
    for _ in range(600):
        copy = bytearray(data)
        for _ in range(generator.choice((1, 1, 1, 4))):
            at = generator.randrange(header if generator.random() < 0.5 else 1500)
            copy[at] = generator.randrange(256)
        damaged.write_bytes(copy)
        with contextlib.suppress(StartError):
            open_all(damaged)
            unnoticed += 1
    assert unnoticed < 500


@pytest.mark.parametrize(
    "head", [b"", b"GGU", b"GGML" + bytes(60), b"GGUF" + struct.pack(">I", 3) + bytes(60), b"GGUF" + bytes(60)]
)
def test_other_files_are_refused(head: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(head)
    with pytest.raises(GgufError):
        GgufFile(path)
