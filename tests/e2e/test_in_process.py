"""`engine.LLM` and HTTP are one engine: equal requests, equal answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from engine import SamplingParams
from engine.llm import LLM
from engine.sampling_params import InvalidParameter

pytestmark = pytest.mark.model

PROMPTS = ["The capital of France is", "One, two, three,", "In the beginning"]


@pytest.mark.parametrize(
    ("params", "body"),
    [
        (SamplingParams(max_tokens=24, temperature=0), {"max_tokens": 24, "temperature": 0}),
        (
            SamplingParams(max_tokens=24, temperature=1.0, seed=5, n=2, top_p=0.9, presence_penalty=0.5),
            {"max_tokens": 24, "temperature": 1.0, "seed": 5, "n": 2, "top_p": 0.9, "presence_penalty": 0.5},
        ),
        (
            SamplingParams(max_tokens=24, temperature=0, stop=("\n",)),
            {"max_tokens": 24, "temperature": 0, "stop": "\n"},
        ),
    ],
    ids=["greedy", "sampled", "stop"],
)
def test_llm_equals_http(http: httpx.Client, llm: LLM, params: SamplingParams, body: dict[str, object]) -> None:
    answer = http.post("/v1/completions", json={"prompt": PROMPTS} | body).json()
    completions = [completion for group in llm.generate(PROMPTS, params, use_tqdm=False) for completion in group]
    assert [c["text"] for c in answer["choices"]] == [c.text for c in completions]
    assert [c["finish_reason"] for c in answer["choices"]] == [c.finish_reason for c in completions]


def test_llm_inside_a_running_loop_refuses_alone_and_ends_in_a_sentence(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, temperature=0)

    async def inside() -> str:
        return llm.generate("The capital of France is", params, use_tqdm=False)[0][0].text

    with pytest.raises(InvalidParameter):
        llm.generate([[1], []], use_tqdm=False)
    assert llm.generate([], use_tqdm=False) == []
    assert "Paris" in asyncio.run(inside())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """As tests/e2e/conftest.py starts the server."""
    with LLM(dtype="float32", max_model_len=2048, memory_bytes=192 << 20, num_threads=2) as llm:
        yield llm


def test_a_script_may_just_end() -> None:
    """No close(): the engine thread must be gone before the interpreter is."""
    script = "from engine import LLM, SamplingParams\nllm = LLM(memory_bytes=1 << 26)\n" + (
        "print(llm.generate('The capital of France is', SamplingParams(max_tokens=4, temperature=0))[0][0].text)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout


def test_llm_tells_the_prompts_logprobs_as_http_does(http: httpx.Client, llm: LLM) -> None:
    body = {"prompt": PROMPTS, "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = http.post("/v1/completions", json=body).json()
    groups = llm.generate(PROMPTS, SamplingParams(max_tokens=0, n=2, prompt_logprobs=0), use_tqdm=False)
    for choice, group in zip(answer["choices"], groups, strict=True):
        assert len(group) == 2
        for completion in group:
            assert completion.prompt_logprobs == choice["logprobs"]["token_logprobs"][1:]
            assert (completion.text, completion.finish_reason) == ("", "length")
