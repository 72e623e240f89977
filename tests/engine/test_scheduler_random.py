"""Whatever arrives, is aborted, fails or is squeezed: every text equals its solo text and nothing leaks."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling_params import SamplingParams
from engine.terms import Terms
from tests.engine.fake_engine import FakeEngine


def random_prompt(rng: random.Random, stems: list[list[int]], longest: int) -> list[int]:
    stem = rng.choice(stems)
    stem = stem[: rng.randrange(len(stem) + 1)]
    tail = [rng.randrange(50) for _ in range(rng.choice([0, 1, 3, 15, 16, 17, 40]))]
    return (stem + tail)[:longest] or [rng.randrange(50)]


def random_params(rng: random.Random) -> SamplingParams:
    max_tokens = rng.choice([0, 1, 2, 5, 20, 60, None])
    return SamplingParams(
        n=rng.choice([1, 1, 1, 2, 3, 6]),
        max_tokens=max_tokens,
        min_tokens=rng.choice([0, 0, 3 if max_tokens is None else min(3, max_tokens)]),
        ignore_eos=rng.random() < 0.6,
        stop_token_ids=rng.choice([(), (11,)]),
        prompt_logprobs=rng.choice([None, None, 0]),
    )


def play(
    seed: int,
    *,
    depth: int,
    num_turns: int = 80,
    with_failures: bool = True,
    change: Callable[[random.Random, FakeEngine, list[int], SamplingParams], SamplingParams] | None = None,
) -> FakeEngine:
    """change: a request's parameters may become others."""
    rng = random.Random(seed)
    max_model_len = rng.choice([48, 96, 200])
    block_size = rng.choice([4, 16])
    num_groups = rng.choice([1, 1, 2])
    least = -(-max_model_len // block_size) * num_groups
    fail_rate = rng.choice([0.0, 0.0, 0.02]) if with_failures else 0.0
    fail_rng = random.Random(seed + 1)
    engine = FakeEngine(
        num_blocks=least + rng.choice([0, 1, 3, least, 8 * least]),
        block_size=block_size,
        max_model_len=max_model_len,
        max_num_seqs=rng.choice([1, 2, 5, 16]),
        budget=rng.choice([16, 24, 64, 512]),
        chunk=rng.choice([1, 7, 16, 300]),
        depth=depth,
        prefix_caching=rng.random() < 0.8,
        num_groups=num_groups,
        fails=lambda batch, index: fail_rng.random() < fail_rate,
    )
    clients = {name: rng.choice([0.5, 1.0, 4.0]) for name in rng.choice([[""], ["", "b"], ["a", "b", "c"]])}
    stems = [[rng.randrange(50) for _ in range(rng.choice([5, 32, 100]))] for _ in range(2)]
    for turn in range(num_turns):
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            stream = 1000 + turn * 10 + rng.randrange(10)
            if (stream, 0) not in engine.requests:
                client = rng.choice(list(clients))
                terms = Terms(client, clients[client], priority=rng.choice([0, 0, -1, 2]))
                for index in range(rng.choice([1, 1, 2])):
                    prompt = random_prompt(rng, stems, max_model_len - 1)
                    params = random_params(rng)
                    if change is not None:
                        params = change(rng, engine, prompt, params)
                    engine.add(
                        prompt,
                        params,
                        stream=stream,
                        index=index,
                        seed=rng.randrange(100),
                        salt=rng.choice(["", "", "a"]),
                        terms=terms,
                    )
        if rng.random() < 0.08 and engine.texts:
            stream, index, choice = rng.choice(list(engine.texts))
            engine.abort(stream, *rng.choice([(), (index,), (index, choice)]))
        if rng.random() < 0.03:
            engine.scheduler.preempt_all()
            engine.scheduler.check()
        if rng.random() < 0.02:
            engine.scheduler.reset_prefix_cache()
            engine.scheduler.check()
        if with_failures and rng.random() < 0.01:
            engine.fail_step()
        engine.step()
    engine.run()
    engine.verify()
    return engine


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_random_life(seed: int, depth: int) -> None:
    play(seed, depth=depth)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(min_value=1000), depth=st.sampled_from([1, 2]))
def test_random_life_with_any_seed(seed: int, depth: int) -> None:
    play(seed, depth=depth, num_turns=30)
