"""A form or a call: the compiler takes both, and nothing else."""

from __future__ import annotations

import json

import pytest

from engine.grammar_source import to_llguidance
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
        (StructuredOutput("json", json.dumps(ANSWER), param="f"), '{"n": 12}', '{"m": 1}'),
        (StructuredOutput("json_object", param="f"), '{"m": [1]}', "[1]"),
        (StructuredOutput("choice", '["yes", "n\\"o"]', param="f"), 'n"o', "maybe"),
        (StructuredOutput("regex", "a/[b/]\\/c", param="f"), "a///c", "abc"),
        (StructuredOutput("regex", r"\d", param="f"), "4", "\u0664"),
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
    assert either(StructuredOutput("lark", 'start: "a"', param="f"), CALLS) is None


OVERLAPPING = {"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 9}]}


def test_the_form_is_as_without_tools() -> None:
    """White space, and what the schema tells the compiler."""
    schema = {"type": "array", "items": OVERLAPPING, "x-guidance": {"coerce_one_of": True}}
    form = StructuredOutput("json", json.dumps(schema), param="f")
    both = either(form, CALLS)
    assert both is not None
    for text, fits in (("[1,\n 2]", True), ("[1, -5]", True), ("[" + " " * 30 + "1]", False), ('["a"]', False)):
        assert Grammar(form, TOKENIZER).accepts(text) == Grammar(both, TOKENIZER).accepts(text) == fits


def test_a_tools_schema_keeps_its_options() -> None:
    parameters = {
        "type": "object", "properties": {"n": OVERLAPPING}, "required": ["n"],
        "x-guidance": {"coerce_one_of": True, "whitespace_pattern": "x"},
    }  # fmt: skip
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = Grammar(forced(tools, names=["f"], parallel=False)[0], TOKENIZER)
    assert grammar.accepts('[{"name": "f", "arguments": {"n": 5}}]')
    assert not grammar.accepts('[{"name": "f", "arguments": {"n":x5}}]')


def test_a_pattern_is_judged_as_without_tools() -> None:
    both = either(StructuredOutput("regex", "*a", param="f"), CALLS)
    assert both is not None
    with pytest.raises(ValueError, match="nothing to repeat"):
        to_llguidance(both)
