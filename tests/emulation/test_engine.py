"""Prompts in, tokens out, through the engine and the emulated kernels: what a request gets does not depend on its
neighbours, on chunks or on the prefix cache, and is what the model says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch

from engine.cuda_graph import DecodeGraphs
from engine.device_batch import decode_forward
from engine.device_runner import DeviceRunner
from engine.runner import ModelRunner
from engine.sampling_params import SamplingParams
from tests.emulation.small_engine import (
    BLOCK,
    MAX_LEN,
    RECIPE,
    Runner,
    SmallEngine,
    Text,
    backbone_of,
    cache_for,
    reference_logits,
    use_kernels,
)
from tests.engine.delayed_lane import DelayedLane
from tests.engine.run_again import RecorderOfRuns
from tests.ops.kernels import EMULATED, kernels_of

VOCAB, MAX_SEQS, MAX_TOKENS = RECIPE.vocab_size, 8, 256
MakeEngine = Callable[..., SmallEngine]


def cpu_runner() -> Runner:
    """The CPU's runner, op by op."""
    backbone = backbone_of(torch.bfloat16)
    return ModelRunner(
        backbone, cache_for(backbone), max_num_seqs=MAX_SEQS, max_model_len=MAX_LEN, vocab_size=VOCAB
    )  # fmt: skip


def device_runner(*, with_graphs: bool = False) -> Runner:
    """A device's, two steps in flight, copies as late as they may be. with_graphs: decode steps are recorded."""
    backbone = backbone_of(torch.bfloat16)
    graphs = None
    cache = cache_for(backbone)
    if with_graphs:
        graphs = DecodeGraphs(
            decode_forward(backbone, MAX_LEN), RecorderOfRuns(), buckets=(1, 2, 4, MAX_SEQS),
            table_width=-(-(MAX_LEN + 1) // BLOCK), device=torch.device("cpu"),
        )  # fmt: skip
        graphs.capture()
    return DeviceRunner(
        backbone, cache, DelayedLane(), max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS,
        max_model_len=MAX_LEN, vocab_size=VOCAB, graphs=graphs,
    )  # fmt: skip


@pytest.fixture(params=[pytest.param(n, marks=[pytest.mark.slow] if n != EMULATED[0] else []) for n in EMULATED])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with kernels_of(request.param) as launched:
        use_kernels(monkeypatch, launched)
        yield
    torch.set_num_threads(before)


RUNNERS: dict[str, tuple[Callable[[], Runner], int]] = {  # and how many steps are in flight
    "cpu-runner": (cpu_runner, 1),
    "device-runner": (device_runner, 2),
    "graphs": (partial(device_runner, with_graphs=True), 2),
}


@pytest.fixture(params=RUNNERS)
def make_engine(request: pytest.FixtureRequest, emulated: None) -> MakeEngine:
    def make(*, budget: int = MAX_TOKENS, chunk: int = 64) -> SmallEngine:
        make_runner, depth = RUNNERS[request.param]
        return SmallEngine(make_runner(), budget=budget, chunk=chunk, depth=depth)

    return make


def prompts_of(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Random prompts; all begin with the same `shared` tokens."""
    rng = random.Random(7)
    stem = [rng.randrange(VOCAB) for _ in range(shared)]
    return [stem + [rng.randrange(VOCAB) for _ in range(length - shared)] for length in lengths]


def params_of(count: int, num_new: int) -> list[SamplingParams]:
    """Greedy and seeded in turn, with logprobs."""
    return [
        SamplingParams(
            max_tokens=num_new, temperature=0.9 if i % 2 else 0.0, top_p=0.95, seed=i, ignore_eos=True, logprobs=2
        )
        for i in range(count)
    ]


def check_model(prompt: list[int], text: Text) -> int:
    """Each token is the most likely one by the reference, or nearly; how many were beyond doubt."""
    logits = reference_logits(prompt + text.token_ids, torch.bfloat16)[len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1)
    certain = 0
    for row, token_id, logprob in zip(logprobs, text.token_ids, text.logprobs, strict=True):
        best, second = row.topk(2).values.tolist()
        assert best - float(row[token_id]) < 0.1
        assert abs(logprob - float(row[token_id])) < 0.1
        if best - second > 0.2:
            assert token_id == int(row.argmax())
            certain += 1
    return certain


def test_a_request_alone_in_a_batch_and_from_the_cache(make_engine: MakeEngine) -> None:
    """The short selection: two prompts that share a block, together, then one of them again."""
    prompts, params = prompts_of(21, 18, shared=17), params_of(2, 3)
    alone = [make_engine().run([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    engine = make_engine(budget=16, chunk=16)  # so both prompts come in chunks
    together = engine.run(prompts, params)
    assert [text.told for text in together] == [text.told for text in alone]
    again = engine.run(prompts[:1], params[:1])
    assert again[0].num_cached >= 16
    assert again[0].told == alone[0].told
    assert check_model(prompts[0], alone[0]) > 0


def test_runners_draw_alike(emulated: None) -> None:
    """Penalties, biases, filters and forked choices: edited by the device's kernels, or by the CPU's sampler."""
    prompts = prompts_of(21, 7, 30, 18)
    params = [
        SamplingParams(n=2, max_tokens=5, temperature=1.2, seed=3, ignore_eos=True, presence_penalty=0.7),
        SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, frequency_penalty=1.5, logprobs=3),
        SamplingParams(max_tokens=4, temperature=0.8, top_k=20, min_p=0.02, seed=4, ignore_eos=True, logprobs=1),
        SamplingParams(
            max_tokens=5, temperature=1.0, top_p=0.9, seed=5, ignore_eos=True, repetition_penalty=1.3,
            logit_bias=((7, 4.0), (9, -100.0)),
        ),
    ]  # fmt: skip
    found = []
    for make_runner, depth in RUNNERS.values():
        engine = SmallEngine(make_runner(), budget=64, chunk=16, depth=depth)
        found.append([text.told for text in engine.run(prompts, params)])
        assert any(batch.block_copies for batch in engine.batches), "no block was shared and written"
    assert found[0][0] != found[0][1], "two choices of one request"
    assert found[1] == found[0]
    assert found[2] == found[0]


@pytest.mark.slow
def test_every_request_gets_what_it_gets_alone(make_engine: MakeEngine) -> None:
    """Prompts of many lengths around the blocks' edges, some with a common beginning, in one batch and in chunks."""
    prompts = prompts_of(1, 15, 16, 33, 70) + prompts_of(40, 49, 35, shared=33)
    params = params_of(len(prompts), 6)
    alone = [make_engine().run([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    for budget, chunk in ((256, 64), (24, 16), (100, 7)):
        engine = make_engine(budget=budget, chunk=chunk)
        got = engine.run(prompts, params)
        assert [text.told for text in got] == [text.told for text in alone]
        again = engine.run(prompts[::-1], params[::-1])
        assert [text.told for text in again] == [text.told for text in alone[::-1]]
        assert again[0].num_cached >= 32
    certain = [check_model(p, t) for p, t, q in zip(prompts, alone, params, strict=True) if q.greedy]
    assert sum(certain) >= 6
