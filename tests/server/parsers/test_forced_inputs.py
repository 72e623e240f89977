"""Calls of custom tools that are held to the format of their input, in every model's own format."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest

from engine.sampling_params import InvalidParameter, StructuredOutput
from server.parsers.base import CallArguments, CallBegin
from server.parsers.forced import forced, tool_at
from server.parsers.formats import KINDS
from server.protocol.call_filters import CustomInputs, OnlyCalls
from server.protocol.chat_tools import Tool, plan
from tests.server.parsers.test_forced import KIND_NAMES, WRITERS, Grammar, byte_tokenizer, format_of

LARK = """start: "say " QUOTED ("\\n" step)*
step: /[a-z]{1,3}/ "\\t" | "\\\\" | "é"
QUOTED: "\\"" /[^"\\n]{0,4}/ "\\""
"""
LARK_PATTERN = r'say "[^"\n]{0,4}"(?:\n(?:[a-z]{1,3}\t|\\|é)){0,}'
REGEX = r'^(?:\d{2,4}-[^a-z"]{1,3}|"\\\n)$'
PATTERNS = {"tell": re.compile(LARK_PATTERN), "dial": re.compile(REGEX, re.ASCII)}
GOOD = {"tell": 'say "ok\t"\nab\t\n\\\né', "dial": "12-Ä\n\\"}
BAD = {"tell": "say ok", "dial": "1-A"}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}


def custom(name: str, syntax: str, definition: str) -> dict[str, Any]:
    grammar = {"syntax": syntax, "definition": definition}
    return {"type": "custom", "custom": {"name": name, "format": {"type": "grammar", "grammar": grammar}}}


TOOLS = [Tool.model_validate(t) for t in (custom("tell", "lark", LARK), WEATHER, custom("dial", "regex", REGEX))]
PLAN = plan(TOOLS, "required", parallel=True)


def held(name: str, *, special: bool = True, parallel: bool = True) -> tuple[Grammar, Callable[[], Any], str]:
    """(the grammar, what makes parsers, its source)."""
    kind, tokenizer = format_of(name, special=special)
    structured, make = kind.forced(PLAN.tools, names=PLAN.forced, parallel=parallel, inputs=PLAN.inputs)
    return (
        Grammar(structured, tokenizer),
        lambda: CustomInputs(OnlyCalls(make()), names=PLAN.custom),
        structured.source,
    )


def written(name: str, source: str, calls: list[tuple[str, str]]) -> str:
    """In the format that the grammar has: where strings are bare, calls are a JSON array."""
    given = [(tool, {"input": text}) for tool, text in calls]
    if 'start: BREAKS? "["' in source and name != "pythonic":
        return json.dumps([{"name": tool, "arguments": values} for tool, values in given], ensure_ascii=False)
    return str(WRITERS[name](given))


def inputs_of(make: Callable[[], Any], text: str, cut: int = 1) -> list[tuple[str, str]]:
    parser = make()
    parts = [part for start in range(0, len(text), cut) for part in parser.feed(text[start : start + cut])]
    calls: list[tuple[str, str]] = []
    for part in [*parts, *parser.finish()]:
        if isinstance(part, CallBegin):
            calls.append((part.name, ""))
        elif isinstance(part, CallArguments):
            calls[-1] = calls[-1][0], calls[-1][1] + part.text
    return calls


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", KIND_NAMES)
def test_inputs_are_held_to_their_format_and_come_back_as_they_were(name: str, special: bool) -> None:
    grammar, make, source = held(name, special=special, parallel=name != "harmony")
    for tool, text in GOOD.items():
        said = written(name, source, [(tool, text)])
        assert grammar.accepts(said), said
        assert inputs_of(make, said) == [(tool, text)]
        assert not grammar.accepts(written(name, source, [(tool, BAD[tool])]))
        assert not grammar.accepts(written(name, source, [("tell" if tool == "dial" else "dial", text)]))
    if name != "harmony":
        both = list(GOOD.items())
        assert inputs_of(make, written(name, source, both), cut=7) == both
        assert grammar.accepts(written(name, source, both))


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "mistral", "kimi_k2", "pythonic", "qwen3_coder", "gemma4"])
def test_whatever_is_drawn_matches(name: str) -> None:
    """As at a temperature without end: every byte that may follow is as likely as any other."""
    grammar, make, _ = held(name, parallel=False)
    ends = 0
    for seed in range(60):
        lots, matcher, drawn = random.Random(seed), grammar._matcher.deep_copy(), []
        while not matcher.is_stopped() and len(drawn) < 600:
            mask = matcher.compute_bitmask()
            allowed = [i for i in range(len(mask) * 8) if mask[i // 8] >> i % 8 & 1]
            drawn.append(lots.choice(allowed))
            matcher.consume_token(drawn[-1])
        assert not matcher.get_error()
        if not matcher.is_stopped():
            continue
        text = grammar._tokenizer.decode(drawn, skip_special_tokens=False).removesuffix("<end>")
        ((tool, given),) = inputs_of(make, text)
        if tool == "weather":
            continue
        assert PATTERNS[tool].fullmatch(given), given
        ends += 1
    assert ends > 20


def test_an_input_may_be_empty() -> None:
    made = plan([Tool.model_validate(custom("f", "lark", 'start: "a"*'))], "required", parallel=None)
    structured, _ = forced(made.tools, names=made.forced, parallel=False, inputs=made.inputs)
    grammar = Grammar(structured, byte_tokenizer([]))
    for text in ("", "a", "aaa"):
        assert grammar.accepts(json.dumps([{"name": "f", "arguments": {"input": text}}]))


def test_a_grammar_that_cannot_be_told_inside_json_is_refused() -> None:
    made = plan([Tool.model_validate(custom("f", "lark", "start: <|end|>"))], "required", parallel=None)
    with pytest.raises(InvalidParameter, match="JSON string: it names the special token") as caught:
        forced(made.tools, names=made.forced, parallel=True, inputs=made.inputs)
    assert caught.value.param == "tools[0].custom.format.grammar.definition"


def test_a_line_of_the_grammar_belongs_to_a_tool() -> None:
    for kind in KINDS:
        tools, _ = format_of(kind.name, special=True)
        structured, _ = tools.forced(PLAN.tools, names=PLAN.forced, parallel=True, inputs=PLAN.inputs)
        lines = structured.source.split("\n")
        found = [tool_at(structured.source, number + 1) for number in range(len(lines))]
        assert found[0] is None
        assert [index for i, index in enumerate(found) if index is not None and index != found[i - 1]] == [0, 1, 2]
        nested = next(i for i, line in enumerate(lines) if line.startswith("QUOTED"))
        assert found[nested] == 0


def test_formats_of_other_tools_do_not_count() -> None:
    inputs = {"other": StructuredOutput("regex", "a")}
    with_it, _ = forced([WEATHER], names=["weather"], parallel=True, inputs=inputs)
    without, _ = forced([WEATHER], names=["weather"], parallel=True)
    assert with_it == without
