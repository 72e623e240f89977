from __future__ import annotations

import logging

import pytest

from engine.config import StartError
from server.parsers import choose
from server.parsers.formats import KINDS
from tests.server.parsers.test_forced import byte_tokenizer

# what a template writes -> the formats: templates of our own, with the marks that real ones have
TEMPLATES = [
    ("{% if tools %}<tool_call>\n{{ call | tojson }}\n</tool_call>{% endif %}", "hermes", None),
    ("{{ tools }}<think></think><tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen3_coder", "think"),
    (
        "{{ tools }}<tool_call>{{ name }}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value></think>",
        "glm",
        "think",
    ),
    ("{{ tools }}[TOOL_CALLS]{{ name }}[ARGS][THINK][/THINK]", "mistral", "mistral"),
    ("{{ tools }}<|tool_call|>", "granite", None),
    ("{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
    ("{{ tools }}<seed:think></seed:think><seed:tool_call><function={{ n }}><parameter={{ k }}>", "seed_oss", "seed"),
    ("{{ tools }}<minimax:tool_call><invoke name=</think>", "minimax_m2", "think"),
    ("{{ tools }}<|tool_call>call:{{ name }}<tool_call|><|channel>thought\n<channel|>", "gemma4", "gemma4"),
    ("{{ tools }}<start_function_call>call:", "functiongemma", None),
    ("{{ tools }}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek_v3", None),
    ("{{ tools }}{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'function_calls>' }}", "deepseek_v32", None),
    ("{{ tools }}{% set dsml = '｜DSML｜' %}{{ '<' + dsml + 'tool_calls>' }}", "deepseek_v4", None),
    (
        '{{ tools }}{"name": function name, "parameters": dictionary of argument name and its value}',
        "llama3_json",
        None,
    ),
    ("{{ tools }}[func_name1(params_name1=params_value1...), func_name2(params)]", "pythonic", None),
    ("{{ tools }}<|tool_call_start|>[", "lfm2", None),
    ("{{ tools }}<|start|>assistant<|channel|>final<|message|>", "harmony", "harmony"),
    ("{{ tools }}<TOOLCALL>[", "nemotron", None),
    ("{{ tools }}<tool_calls>[", "tool_calls", None),
    ("{{ tools }}<function={{ name }}>", "functionary", None),
    ('{{ tools }}<function name="{{ n }}"><param name="{{ k }}">', "minicpm", None),
    ("{{ tools }}<function_calls>", "olmo3", None),
    ("{{ message.content }}</think>", "none", "think"),
    ("{{ message.content }}", "none", None),
]


@pytest.mark.parametrize(("template", "tools", "reasoning"), TEMPLATES)
def test_a_template_tells_its_format(
    template: str, tools: str, reasoning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    found = choose(template, byte_tokenizer([]), tool_parser="auto", reasoning_parser="auto")
    assert (found.name, found.reasoning.name if found.reasoning else None) == (tools, reasoning)
    assert not caplog.records


def test_every_format_is_told_by_some_template() -> None:
    assert {tools for _, tools, _ in TEMPLATES} == {kind.name for kind in KINDS} | {"none"}


def test_the_vocabulary_counts_where_the_template_is_silent() -> None:
    template = "{% if tools %}List of tools: {{ tools }}{% endif %}"
    found = choose(template, byte_tokenizer(["<|tool_call_start|>"]), tool_parser=None, reasoning_parser=None)
    assert found.name == "lfm2"
    assert (
        choose("no calls", byte_tokenizer(["<|tool_call_start|>"]), tool_parser=None, reasoning_parser=None).tools
        is None
    )


@pytest.mark.parametrize("template", ["{{ tools }}@call", "{{ tools }}<tool_call><invoke name={{ n }}>"])
def test_tools_in_no_known_format_are_told_at_start(template: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        found = choose(template, byte_tokenizer([]), tool_parser="auto", reasoning_parser="auto")
    assert found.tools is None
    assert "--tool-call-parser" in caplog.text


def test_flags_win() -> None:
    template = "{{ tools }}<tool_call></think>"
    found = choose(template, byte_tokenizer([]), tool_parser="glm", reasoning_parser="seed")
    assert found.name == "glm"
    assert found.reasoning is not None
    assert found.reasoning.name == "seed"
    found = choose(template, byte_tokenizer([]), tool_parser="none", reasoning_parser="none")
    assert (found.tools, found.reasoning) == (None, None)


@pytest.mark.parametrize(("flag", "names"), [("tool", "hermes"), ("reasoning", "think")])
def test_an_unknown_name_is_told_with_those_there_are(flag: str, names: str) -> None:
    given = {"tool_parser": "auto", "reasoning_parser": "auto", f"{flag}_parser": "hermess"}
    with pytest.raises(StartError, match=f"hermess: there is auto, none, .*{names}"):
        choose("", byte_tokenizer([]), **given)


def test_marks_that_are_special_tokens_stay_visible() -> None:
    tokenizer = byte_tokenizer(["<tool_call>", "</think>", "<other>"])
    found = choose("{{ tools }}<tool_call></think>", tokenizer, tool_parser="auto", reasoning_parser="auto")
    shown = {tokenizer.decode([i], skip_special_tokens=False) for i in found.shown_special_tokens}
    assert shown == {"<tool_call>", "</think>"}
