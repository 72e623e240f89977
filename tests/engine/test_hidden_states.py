"""The two halves of a forward: hidden states behind the last norm, and logits of some of them; and models without."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import Tensor, nn

from engine.assembly import EngineParts, load_engine
from engine.attention.reference import ReferenceAttention
from engine.config import EngineConfig
from engine.models import tree as tree_module
from engine.outputs import SequenceOutput
from engine.sampling_params import SamplingParams
from tests.engine.harness import Harness
from tests.engine.test_backbone import PagedRun
from tests.engine.test_pooling import config_of
from tests.engine.tiny_configs import CONFIGS, FUSED, Way, paged_backbone, plain_tree, relative, tokens
from tests.tiny import tiny_folder

CASES = [(name, way) for name in CONFIGS for way in get_args(Way) if way != "fused" or name in FUSED]


def head_input(name: str, ids: list[int]) -> Tensor:
    """What transformers' own head sees, [num_tokens, hidden_size]."""
    tree = plain_tree(name)
    seen: list[Tensor] = []
    tree.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.inference_mode():
        tree(input_ids=torch.tensor([ids]), use_cache=False)
    return seen[0][0]


@pytest.mark.parametrize(("name", "way"), CASES)
def test_hidden_states_are_what_the_head_sees(name: str, way: Way) -> None:
    backbone = paged_backbone(name, ReferenceAttention(), way)
    ids = tokens(21)
    inputs = torch.tensor(ids), torch.arange(21)
    run = PagedRun(backbone)
    hidden = backbone.hidden_states(*inputs, run.metadata_for([(0, ids)]))
    assert hidden.shape == (21, backbone.hidden_size)
    assert relative(hidden, head_input(name, ids)) < 1e-5
    wanted = torch.tensor([20, 3, 4])
    run = PagedRun(backbone)
    logits = backbone.forward(*inputs, run.metadata_for([(0, ids)]), wanted)
    halves = backbone.logits(hidden[wanted])
    assert halves.dtype == torch.float32
    if way == "plain":
        assert relative(halves, logits) < 1e-6
    else:
        assert torch.equal(halves, logits)
    assert backbone.logits(hidden[:0]).shape == (0, backbone.vocab_size)
    assert all(layer.metadata is None for layer in backbone.layers)


def test_the_body_is_the_child_that_transformers_names() -> None:
    tree = plain_tree("llama")
    tree.draft = plain_tree("qwen3").model
    assert tree_module._body(tree) is tree.model


def test_a_tree_without_a_body_apart_from_its_head_has_no_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = paged_backbone("llama", ReferenceAttention(), "plain")
    assert whole.tells_hidden_states
    monkeypatch.setattr(tree_module, "PreTrainedModel", nn.Conv1d)
    monkeypatch.setattr("transformers.LlamaForCausalLM.base_model_prefix", "elsewhere")
    backbone = paged_backbone("llama", ReferenceAttention(), "plain")
    assert not backbone.tells_hidden_states
    ids = tokens(9)
    inputs, wanted = (torch.tensor(ids), torch.arange(9)), torch.tensor([8])
    expected, got = (
        each.forward(*inputs, PagedRun(each).metadata_for([(0, ids)]), wanted) for each in (whole, backbone)
    )
    assert torch.equal(got, expected)


def test_what_needs_the_halves_is_refused_by_request(tmp_path: Path) -> None:
    def load(config: EngineConfig) -> EngineParts:
        parts = load_engine(config)
        parts.runner.backbone.tells_hidden_states = False  # type: ignore[attr-defined]  # of ModelRunner
        return parts

    async def last(harness: Harness, params: SamplingParams) -> SequenceOutput:
        outputs = [each async for told in harness.engine.generate([[5, 6, 7]], params) for each in told]
        return outputs[-1]

    async def together(harness: Harness, *params: SamplingParams) -> list[SequenceOutput]:
        return await asyncio.gather(*(last(harness, each) for each in params))

    plain = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with Harness(config_of(tiny_folder(tmp_path, "llama")), load) as harness:
        outputs = harness.loop.run_until_complete(
            together(
                harness,
                plain,
                replace(plain, prompt_logprobs=0),
                SamplingParams(max_tokens=0, prompt_logprobs=2),
                SamplingParams(max_tokens=0, pooling="mean"),
                plain,
            )
        )
    assert [output.error_param for output in outputs] == [None, "prompt_logprobs", "prompt_logprobs", "model", None]
    assert [output.error is None for output in outputs] == [True, False, False, False, True]
    assert outputs[0].finish_reason == "length"
