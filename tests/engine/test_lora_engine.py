"""Adapters in a whole engine: token for token what the merged model says, whatever runs beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.assembly import EngineParts, load_engine
from engine.config import (
    Adapter,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    LoraConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    StartError,
)
from engine.llm import LLM
from engine.models import loader
from engine.models.adapted_tree import AdaptedLinear
from engine.models.fused import FusedModel
from engine.models.tree import TreeModel
from engine.sampling_params import BeamSearch, InvalidParameter, SamplingParams
from tests.engine.adapters import LayerShape, merge, shapes_in, write_adapter
from tests.engine.harness import Generated, Harness
from tests.engine.preempting import load_preempting
from tests.engine.test_batch_invariance import requests_of
from tests.tiny import VOCAB_SIZE, byte_tokenizer, tiny_folder

NAMES = ("", "a", "b", "a", "", "b", "b")  # of the requests in turn
Load = Callable[[EngineConfig], EngineParts]


def unfused_folder(parent: Path) -> Path:
    """A model without a recipe."""
    folder = parent / "unfused"
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "gpt2", vocab_size=VOCAB_SIZE, n_embd=64, n_inner=96, n_layer=2, n_head=4, n_positions=1024,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.5 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def folder_of(parent: Path, kind: str) -> Path:
    return unfused_folder(parent) if kind == "unfused" else tiny_folder(parent, kind)


def adapters_for(folder: Path) -> tuple[Adapter, Adapter]:
    shapes = shapes_in(AutoModelForCausalLM.from_pretrained(folder))
    some: dict[str, LayerShape] = {
        path: shape for path, shape in shapes.items() if path.endswith(("q_proj", "v_proj", "down_proj", "c_attn"))
    }
    home = folder.parent / "adapters"
    return write_adapter(home / "a", shapes, seed=1), write_adapter(home / "b", some, seed=2, rank=8, use_rslora=True)


def merged_folder(folder: Path, adapter: Adapter, scale: float | None = None) -> Path:
    model = AutoModelForCausalLM.from_pretrained(folder)
    merge(model, adapter, None if scale is None else dict.fromkeys(shapes_in(model), scale))
    merged = folder.parent / f"{folder.name}-{adapter.name}"
    model.save_pretrained(merged)
    byte_tokenizer().save(str(merged / "tokenizer.json"))
    return merged


def config_of(
    folder: Path,
    adapters: tuple[Adapter, ...] = (),
    *,
    dtype: Any = "float32",
    quantization: Quantization = "none",
    budget: int = 2048,
    chunk: int = 512,
    max_num_seqs: int = 32,
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(folder), dtype=dtype, quantization=quantization, max_model_len=600),
        cache=CacheConfig(memory_bytes=200 << 20),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_chunk_tokens=chunk),
        device=DeviceConfig(num_threads=1),
        lora=LoraConfig(adapters),
    )


def ask(
    harness: Harness, prompts: Sequence[list[int]], params: Sequence[SamplingParams], names: Sequence[str]
) -> list[Generated]:
    """All at once."""

    async def together() -> list[dict[tuple[int, int], Generated]]:
        jobs = (harness.collect([p], q, adapter=n) for p, q, n in zip(prompts, params, names, strict=True))
        return await asyncio.gather(*jobs)

    return [got[0, 0] for got in harness.loop.run_until_complete(together())]


def named(count: int) -> list[str]:
    return [NAMES[i % len(NAMES)] for i in range(count)]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma3_text", "unfused"])
def test_says_what_the_merged_model_says(kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, kind)
    adapters = adapters_for(folder)
    prompts, params = requests_of(VOCAB_SIZE, 21)
    params = [replace(each, temperature=0.0) for each in params]  # a draw may fall between two roundings
    names = named(len(prompts))
    with Harness(config_of(folder, adapters, budget=128, chunk=48)) as harness:
        got = ask(harness, prompts, params, names)
    folders = {
        "": folder,
        "a": merged_folder(folder, adapters[0]),
        "b": merged_folder(folder, adapters[1], 8.0 / 8**0.5),
    }
    for name, merged in folders.items():
        own = [i for i, each in enumerate(names) if each == name]
        with Harness(config_of(merged)) as harness:
            expected = ask(harness, [prompts[i] for i in own], [params[i] for i in own], [""] * len(own))
        for i, each in zip(own, expected, strict=True):
            assert got[i].token_ids == each.token_ids, (name, i)
            assert got[i].logprobs == pytest.approx(each.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "quantization"),
    [
        ("llama", "float32", "none"),
        ("llama", "bfloat16", "none"),
        ("qwen3", "bfloat16", "int8"),
        ("unfused", "bfloat16", "none"),
    ],
)
def test_nothing_around_a_row_changes_its_bits(
    kind: str, dtype: str, quantization: Quantization, tmp_path: Path
) -> None:
    folder = folder_of(tmp_path, kind)
    adapters = adapters_for(folder)
    prompts, params = requests_of(VOCAB_SIZE, 14)
    names = named(len(prompts))
    options: dict[str, Any] = {"dtype": dtype, "quantization": quantization}

    def bits(config: EngineConfig, load: Load = load_engine) -> list[tuple[list[int], list[float]]]:
        with Harness(config, load) as harness:
            return [(each.token_ids, each.logprobs) for each in ask(harness, prompts, params, names)]

    with Harness(config_of(folder, adapters, **options)) as harness:
        alone = [ask(harness, [p], [q], [n])[0] for p, q, n in zip(prompts, params, names, strict=True)]
        warm = ask(harness, prompts, params, names)
        assert any(each.num_cached_tokens for each in warm)
    expected = [(each.token_ids, each.logprobs) for each in alone]
    assert [(each.token_ids, each.logprobs) for each in warm] == expected, "together, warm"
    assert bits(config_of(folder, adapters, budget=32, chunk=7, **options)) == expected, "in chunks"
    assert bits(config_of(folder, adapters, max_num_seqs=5, **options), load_preempting) == expected, "preempted"
    # those without an adapter, in an engine that has none
    with Harness(config_of(folder, **options)) as harness:
        for i, name in enumerate(names):
            if not name and kind != "unfused":
                plain = ask(harness, [prompts[i]], [params[i]], [""])[0]
                assert (plain.token_ids, plain.logprobs) == expected[i]


def test_blocks_are_shared_under_one_adapter_alone(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    adapters = adapters_for(folder)
    prompt = requests_of(VOCAB_SIZE, 1)[0][0][:70]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with Harness(config_of(folder, adapters)) as harness:
        first = {name: ask(harness, [prompt], [params], [name])[0] for name in ("", "a", "b")}
        second = {name: ask(harness, [prompt], [params], [name])[0] for name in ("b", "", "a")}
    assert [each.num_cached_tokens for each in first.values()] == [0, 0, 0]
    assert all(each.num_cached_tokens >= 64 for each in second.values())
    assert len({tuple(each.token_ids) for each in first.values()}) == 3
    assert {name: each.token_ids for name, each in second.items()} == {n: e.token_ids for n, e in first.items()}


def test_choices_and_beams_of_a_request_have_its_adapter(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    adapters = adapters_for(folder)
    prompt = requests_of(VOCAB_SIZE, 2)[0][1]
    merged = merged_folder(folder, adapters[0])
    sampled = SamplingParams(max_tokens=16, temperature=0.8, seed=4, n=3, ignore_eos=True)
    beams = SamplingParams(max_tokens=8, n=2, temperature=0.0, beam=BeamSearch(4))
    for params in (sampled, beams):
        with Harness(config_of(folder, adapters)) as harness:
            got, _ = harness.loop.run_until_complete(_beside(harness, prompt, params))
        with Harness(config_of(merged)) as harness:
            expected = harness.run([prompt], params)
        assert {key: each.token_ids for key, each in got.items()} == {k: e.token_ids for k, e in expected.items()}


async def _beside(harness: Harness, prompt: list[int], params: SamplingParams) -> Any:
    other = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    return await asyncio.gather(
        harness.collect([prompt], params, adapter="a"), harness.collect([prompt], other, adapter="b")
    )


@pytest.mark.parametrize("kind", ["llama", "unfused"])
def test_vectors_and_logprobs_of_prompts_are_the_adapters(kind: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, kind)
    adapters = adapters_for(folder)
    prompts, _ = requests_of(VOCAB_SIZE, 7)
    names = named(len(prompts))
    scored = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0)
    pooled = [SamplingParams(max_tokens=0, pooling=("mean", "last")[i % 2]) for i in range(len(prompts))]

    async def vectors(harness: Harness, indices: Sequence[int], names: Sequence[str]) -> list[bytes]:
        async def vector(i: int, name: str) -> bytes:
            stream = harness.engine.generate([prompts[i]], pooled[i], adapter=name)
            return b"".join([o.embedding or b"" async for outputs in stream for o in outputs])

        return list(await asyncio.gather(*map(vector, indices, names)))

    everything = range(len(prompts))
    with Harness(config_of(folder, adapters, budget=96, chunk=40)) as harness:
        told = [each.prompt_logprobs for each in ask(harness, prompts, [scored] * len(prompts), names)]
        mixed = harness.loop.run_until_complete(vectors(harness, everything, names))
    merged = {"": folder, "a": merged_folder(folder, adapters[0])}
    for name, path in merged.items():
        own = [i for i in everything if names[i] == name]
        with Harness(config_of(path)) as harness:
            expected = harness.loop.run_until_complete(vectors(harness, own, [""] * len(own)))
            logprobs = ask(harness, [prompts[i] for i in own], [scored] * len(own), [""] * len(own))
        for i, vector, each in zip(own, expected, logprobs, strict=True):
            assert told[i] == pytest.approx(each.prompt_logprobs, abs=1e-3)
            ours, theirs = (torch.frombuffer(bytearray(v), dtype=torch.float32) for v in (mixed[i], vector))
            assert len(ours)
            assert float((ours - theirs).abs().max()) < 1e-4 * float(theirs.abs().max())


def test_the_model_without_a_recipe_has_none(tmp_path: Path) -> None:
    folder = unfused_folder(tmp_path)
    model = load_engine(config_of(folder, adapters_for(folder))).runner.backbone.model
    assert isinstance(model, TreeModel)
    assert len([1 for module in model.tree.modules() if isinstance(module, AdaptedLinear)]) == 8


def test_adapters_count_as_weights_and_the_one_call_stays(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    adapters = adapters_for(folder)
    plain, with_adapters = (load_engine(config_of(folder, each)).runner.backbone for each in ((), adapters))
    sizes = sum((Path(each.path) / "adapter_model.safetensors").stat().st_size for each in adapters)
    assert with_adapters.weight_bytes > plain.weight_bytes + sizes * 0.9
    model = with_adapters.model
    assert isinstance(model, FusedModel)
    assert model.decoder is not None
    assert model.step_bytes(100, 1) > plain.model.step_bytes(100, 1)
    assert with_adapters.batch_invariant
    assert with_adapters.num_adapters == 2


def test_a_later_start_takes_them_too_and_one_without_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_folder(tmp_path, "llama")
    adapters = adapters_for(folder)
    config = config_of(folder, adapters)
    config = replace(config, model=replace(config.model, cache_dir=str(tmp_path / "cache")))
    prompt, params = [5, 6, 7], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    texts = []
    for _ in range(2):
        with Harness(config) as harness:
            texts.append(ask(harness, [prompt], [params], ["a"])[0].token_ids)
            phases = harness.engine.model_info.load_seconds
            assert "adapters" in phases
    assert texts[0] == texts[1]
    assert "modelling_code" not in phases
    monkeypatch.setattr(loader.importlib, "import_module", None)
    assert "adapters" not in load_engine(replace(config, lora=LoraConfig())).info.load_seconds


def test_a_bad_adapter_stops_the_start(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    wrong = write_adapter(tmp_path / "wrong", {"model.layers.0.self_attn.q_proj": LayerShape(8, 8)})
    with pytest.raises(StartError, match="'wrong'"):
        load_engine(config_of(folder, (wrong,)))


def test_the_offline_engine_takes_adapters(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path, "llama")
    adapters = adapters_for(folder)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "memory_bytes": 50 << 20, "num_threads": 1, "max_model_len": 200}
    with LLM(str(folder), adapters=adapters, **settings) as llm:
        got = {name: llm.generate([[5, 6, 7]], params, adapter=name, use_tqdm=False)[0][0] for name in ("", "a", "b")}
        with pytest.raises(InvalidParameter):
            llm.generate([[5, 6, 7]], params, adapter="c", use_tqdm=False)
    assert len({tuple(each.token_ids) for each in got.values()}) == 3
