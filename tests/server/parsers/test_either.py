"""A form or a call: the compiler takes both, and nothing else."""

from __future__ import annotations

import json

import pytest

from engine.sampling_params import StructuredOutput
from server.parsers.either import either
from server.parsers.forced import forced
from tests.server.parsers.test_forced import TOOLS, Grammar, byte_tokenizer

ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
TOKENIZER = byte_tokenizer([])
CALLS, _ = forced(TOOLS, names=["now"], parallel=True)


@pytest.mark.parametrize(
    ("form", "good", "bad"),
    [
        (StructuredOutput("json", json.dumps(ANSWER), "f"), '{"n": 12}', '{"m": 1}'),
        (StructuredOutput("json_object", param="f"), '{"m": [1]}', "[1]"),
        (StructuredOutput("choice", '["yes", "n\\"o"]', "f"), 'n"o', "maybe"),
        (StructuredOutput("regex", "a/[b/]\\/c", "f"), "a///c", "abc"),
    ],
)
def test_form_or_call(form: StructuredOutput, good: str, bad: str) -> None:
    both = either(form, CALLS)
    assert both is not None
    assert both.param == "f"
    grammar = Grammar(both, TOKENIZER)
    assert grammar.accepts(good)
    assert Grammar(both, TOKENIZER).accepts('[{"name": "now", "arguments": {}}]')
    assert not Grammar(both, TOKENIZER).accepts(bad)


def test_a_grammar_of_ones_own_is_not_mixed() -> None:
    assert either(StructuredOutput("lark", 'start: "a"', "f"), CALLS) is None
