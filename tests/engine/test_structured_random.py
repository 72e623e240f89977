"""Random schemas, random logits, temperature 2: what ends is an instance of its schema, by a judge of its own."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.sampling_params import SamplingParams, StructuredOutput
from tests.engine.harness import Harness
from tests.tiny import tiny_folder

NUM_SCHEMAS = 48
LIMIT = 300


class Schemas:
    """Random schemas of every kind that is offered, nested a few levels deep."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def root(self) -> dict[str, Any]:
        schema = self.object(2) if self.dice.random() < 0.7 else self.any(3)
        return {**schema, "$defs": {"small": self.leaf(), "pair": self.array(0)}}

    def any(self, depth: int) -> dict[str, Any]:
        if depth == 0:
            return self.leaf()
        reference = {"$ref": self.dice.choice(["#/$defs/small", "#/$defs/pair"])}
        either = {"anyOf": [self.any(depth - 1), self.any(depth - 1)]}
        nested = (self.object(depth - 1), self.array(depth - 1))
        return self.dice.choice([self.leaf(), self.leaf(), reference, either, *nested])

    def leaf(self) -> dict[str, Any]:
        low = self.dice.randint(-50, 50)
        return self.dice.choice([
            {"type": "string", "minLength": self.dice.randint(0, 2), "maxLength": self.dice.randint(2, 6)},
            {"type": "string", "pattern": self.dice.choice(["^[a-z]{1,4}$", "^\\d{2}-\\d{2}$", "^(ab|cd)*e$"])},
            {"type": "string", "format": self.dice.choice(["date", "uuid", "ipv4"])},
            {"type": "integer", "minimum": low, "maximum": low + self.dice.randint(0, 2000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 9},
            {"type": "number", "minimum": low / 4, "maximum": low / 4 + 3},
            {"type": ["boolean", "null"]},
            {"enum": ["a", "é😀", 3, None, [1, {"b": "\n"}]]},
            {"const": {"k": [True, "\u2028\"\\"]}},
        ])  # fmt: skip

    def object(self, depth: int) -> dict[str, Any]:
        names = self.dice.sample(["a", "b", "long name", "é", 'q"uote'], self.dice.randint(1, 3))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.any(depth) for name in names}}
        schema["required"] = [name for name in names if self.dice.random() < 0.6]
        schema["additionalProperties"] = self.dice.choice([False, False, {"type": "boolean"}])
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        low = self.dice.randint(0, 2)
        return {"type": "array", "items": self.any(depth), "minItems": low, "maxItems": low + self.dice.randint(0, 2)}


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tiny_folder(tmp_path_factory.mktemp("models"), "qwen2")
    config = EngineConfig(
        model=ModelConfig(model=str(folder), dtype="float32", max_model_len=512),
        cache=CacheConfig(memory_bytes=64 << 20),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SCHEMAS),
    )
    with Harness(config) as harness:
        yield harness


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_what_ends_is_an_instance(harness: Harness, seed: int) -> None:
    make = Schemas(seed)
    schemas = [make.root() for _ in range(NUM_SCHEMAS)]
    forms = [StructuredOutput("json", json.dumps(schema)) for schema in schemas]
    for form in forms:
        harness.loop.run_until_complete(harness.engine.compile(form))
    hot = SamplingParams(max_tokens=LIMIT, temperature=2.0)
    params = [replace(hot, structured=form, seed=seed) for form in forms]
    results = harness.run_each([[7, 8, 9]] * NUM_SCHEMAS, params)
    ended = 0
    for schema, result in zip(schemas, results, strict=True):
        got = result[0, 0]
        assert got.finish_reason in ("stop", "length"), got.error
        if got.finish_reason == "length":
            assert len(got.token_ids) == LIMIT
            continue
        ended += 1
        text = harness.engine.tokenizer.decode(got.token_ids)
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
        assert text == text.strip()
    assert ended > NUM_SCHEMAS // 2
