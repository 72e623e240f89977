"""lm-evaluation-harness through its `local-completions` model: scoring by echo and logprobs, and generation, on a task
of three questions that stands here."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from tests.clients.conftest import KEY, MODEL

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " a spoon"], "answer": 0},
    {"question": "Two plus two is", "choices": [" green", " four"], "answer": 1},
    {"question": "Water is made of hydrogen and", "choices": [" oxygen", " music"], "answer": 0},
]


@pytest.fixture
def model(v1: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    return LocalCompletionsAPI(
        base_url=v1 + "/completions", model=MODEL, auth_token=KEY, num_concurrent=4, max_retries=1, max_length=2048
    )


def task(**config: Any) -> Any:
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    shared = {
        "task": "three_questions",
        "custom_dataset": lambda **_: {"test": Dataset.from_list(QUESTIONS)},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
    }
    return ConfigurableTask(config={**shared, **config})


def test_multiple_choice(model: Any, base_url: str) -> None:
    choice = task(
        output_type="multiple_choice",
        doc_to_target="answer",
        doc_to_choice="choices",
        metric_list=[{"metric": "acc"}],
    )
    done = lm_eval.simple_evaluate(model=model, tasks=[choice], log_samples=True, bootstrap_iters=0)
    assert done["results"]["three_questions"]["acc,none"] == 1.0
    for sample in done["samples"]["three_questions"]:
        for (value, _), text in zip(sample["filtered_resps"], sample["doc"]["choices"], strict=True):
            assert math.isclose(float(value), score(base_url, sample["doc"]["question"], text), abs_tol=1e-3)


def score(base_url: str, question: str, text: str) -> float:
    """The log-probability of `text` after `question`, asked for directly."""
    headers = {"Authorization": f"Bearer {KEY}"}
    body = {"model": MODEL, "prompt": question + text, "echo": True, "logprobs": 1, "max_tokens": 0}
    found = httpx.post(f"{base_url}/v1/completions", json=body, headers=headers, timeout=60).json()
    logprobs = found["choices"][0]["logprobs"]
    pairs = zip(logprobs["text_offset"], logprobs["token_logprobs"], strict=True)
    return sum(value for offset, value in pairs if offset >= len(question))


def test_generation(model: Any) -> None:
    written = task(
        output_type="generate_until",
        doc_to_target="{{choices[answer]}}",
        generation_kwargs={"until": ["\n", "."], "max_gen_toks": 8},
        metric_list=[{"metric": "exact_match"}],
    )
    done = lm_eval.simple_evaluate(model=model, tasks=[written], log_samples=True, bootstrap_iters=0)
    answers = [sample["filtered_resps"][0] for sample in done["samples"]["three_questions"]]
    assert len(answers) == len(QUESTIONS)
    assert any("Paris" in answer for answer in answers)
