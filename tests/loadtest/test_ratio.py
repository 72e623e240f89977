"""Served over generate: the batches are the largest that fit, the tokens that count are the useful ones."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from loadtest import cli, padded
from loadtest.lengths import UsageError
from loadtest.padded import BASELINE, Batch, plan_batches, sample_batches
from loadtest.workloads import PlannedRequest

from .test_compare import FAKE, REPOSITORY


def requests_of(shapes: list[tuple[int, int]]) -> list[PlannedRequest]:
    return [PlannedRequest(index, tuple(range(prompt)), output) for index, (prompt, output) in enumerate(shapes)]


def test_batches_fit_and_none_could_be_larger() -> None:
    random = Random(4)
    requests = requests_of([(random.randint(5, 200), random.randint(1, 100)) for _ in range(60)])
    for rows, budget in ((1, 400), (8, 900), (64, 3000)):
        batches = plan_batches(requests, rows, budget)
        assert sorted(each.index for batch in batches for each in batch.requests) == list(range(60)), "each once"
        prompts = [len(each.prompt) for batch in batches for each in batch.requests]
        assert prompts == sorted(prompts)
        for batch, following in pairwise(batches):
            assert len(batch.requests) <= rows
            assert batch.kv_tokens <= budget
            grown = Batch((*batch.requests, following.requests[0]))
            assert len(grown.requests) > rows or grown.kv_tokens > budget
    batch = Batch(tuple(requests_of([(10, 3), (20, 50)])))
    assert (batch.kv_tokens, batch.max_new_tokens, batch.useful_tokens) == (2 * 70, 50, 53)
    with pytest.raises(UsageError, match="does not fit"):
        plan_batches(requests_of([(10, 10)]), 4, 19)


def test_samples_are_even_and_the_rounds_share_the_batches() -> None:
    batches = [Batch(tuple(requests_of([(10 + number, 4)]))) for number in range(10)]
    assert sample_batches(batches, None, 3) == sample_batches(batches, 10, 3) == batches
    assert sample_batches(batches, 4, 0) == batches[0::3]
    rounds = [sample_batches(batches, 4, number) for number in range(3)]
    assert all(len(sample) <= 4 for sample in rounds)
    assert sorted(batch.kv_tokens for sample in rounds for batch in sample) == [batch.kv_tokens for batch in batches]


STUB = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    batches = json.loads(line)["batches"]
    print(json.dumps({"seconds": sum(batch["max_new_tokens"] for batch in batches) * 0.01}), flush=True)
"""


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """generate is a stub that takes 10 ms a step; the served side is the fake server."""
    stub = tmp_path / "stub.py"
    stub.write_text(STUB)
    monkeypatch.setattr(padded, "BASELINE", stub)
    monkeypatch.chdir(REPOSITORY)
    result_path = tmp_path / "r.json"
    flags = [
        "--lengths",
        "short",
        "--concurrency",
        "1,4",
        "--requests",
        "4",
        "--rounds",
        "2",
        "--json",
        str(result_path),
        "--max-batches",
        "3",
    ]
    server = f"{FAKE} --first 0.001 --gap 0.001"
    assert cli.main(["ratio", "some-model", *flags, "--command", server]) == 0
    result = json.loads(result_path.read_text())
    alone, together = result["points"]
    assert alone["generate_rows"] == 1
    assert alone["generate_useful"] == 1.0
    assert alone["generate_tokens_per_s"] == pytest.approx(100.0)
    assert together["generate_rows"] == 4
    assert together["generate_tokens_per_s"] == pytest.approx(400.0 * together["generate_useful"], rel=0.2)
    for point in result["points"]:
        assert len(point["ratios"]) == 2
        assert point["ratio"] == pytest.approx(sum(point["ratios"]) / 2)
    assert "up to 24x" in capsys.readouterr().out
    assert cli.main(["ratio", "m", "--lengths", "endless"]) == 2
    assert cli.main(["ratio", "m", "--max-batches", "0"]) == 2
    stub.write_text("raise SystemExit(3)")
    assert cli.main(["ratio", "m", *flags, "--command", server]) == 2
    assert "ended with code 3" in capsys.readouterr().err


@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_padded_generate_is_generate(cache: str) -> None:
    """The baseline computes what each row alone would: a baseline that computes nonsense would be an easy rival."""
    spec = spec_from_file_location("transformers_generate", BASELINE)
    assert spec is not None
    assert spec.loader is not None
    script = module_from_spec(spec)
    spec.loader.exec_module(script)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, eos_token_id=5, bos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    prompts = [[7, 8, 9], [11, 12, 13, 14, 15, 16], [21]]
    together = script.run_batch(model, prompts, 6, cache)
    assert [len(row) for row in together] == [6, 6, 6], "past any end token"
    for prompt, row in zip(prompts, together, strict=True):
        assert script.run_batch(model, [prompt], 6, cache) == [row]
