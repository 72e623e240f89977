"""Grammars for calls, asked with the compiler that the engine uses: one byte is one token, marks are special."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from engine.grammar_probe import Vocabulary, new_matcher, new_tokenizer
from engine.grammar_source import to_llguidance
from engine.sampling_params import InvalidParameter, StructuredOutput
from engine.tokenizer import Tokenizer
from server.parsers.forced import MAX_CALLS, forced
from server.parsers.formats import KINDS
from server.parsers.select import ToolFormat
from tests.server.parsers.cuts import every_cut, values

END = "<end>"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "spot": {"$ref": "#/$defs/spot"},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"spot": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "hidden", "parameters": {"type": "object"}}},
]
GOOD = {"city": "Köln \"{'<[", "unit": "C", "days": 3, "spot": {"x": 1.5}}
SHORT = {"city": "", "days": 7}


def byte_tokenizer(specials: list[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*specials, END])
    return Tokenizer(backend)


class Grammar:
    def __init__(self, structured: StructuredOutput, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        end = tokenizer.token_id(END)
        assert end is not None
        special = [i for i in ids if tokenizer.is_special(i)]
        vocabulary = Vocabulary([tokenizer.token_bytes(i) for i in ids], special, [end])
        self._tokenizer = tokenizer
        self._matcher = new_matcher(new_tokenizer(vocabulary), to_llguidance(structured))
        assert not self._matcher.get_error()

    def accepts(self, text: str) -> bool:
        """The whole text, and then the end."""
        matcher = self._matcher.deep_copy()
        ids = self._tokenizer.encode(text, add_special_tokens=False, allow_special=True)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    def may_begin(self, text: str) -> bool:
        ids = self._tokenizer.encode(text, add_special_tokens=False, allow_special=True)
        return bool(self._matcher.deep_copy().try_consume_tokens(ids) == len(ids))


def js(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def in_object(before: str, between: str, after: str, head: str = "arguments", tail: str = "") -> Any:
    def write(calls: list[tuple[str, dict[str, Any]]]) -> str:
        texts = [f'{tail}{{"name": {js(name)}, "{head}": {js(given)}}}' for name, given in calls]
        return before + between.join(texts) + after

    return write


def in_tags(before: str, key: str, end: str, after: str, separator: str = "\n", other: str = "") -> Any:
    def write(calls: list[tuple[str, dict[str, Any]]]) -> str:
        texts = []
        for name, given in calls:
            pieces = [
                (key if isinstance(v, str) else other or key).replace("%", k)
                + (v if isinstance(v, str) else js(v))
                + end
                for k, v in given.items()
            ]
            texts.append(before.replace("%", name) + "".join(pieces) + after)
        return separator.join(texts)

    return write


def named(before: str, head: str, tail: str, after: str, between: str = "") -> Any:
    def write(calls: list[tuple[str, dict[str, Any]]]) -> str:
        texts = [
            head.replace("%i", str(i)).replace("%", name) + js(given) + tail for i, (name, given) in enumerate(calls)
        ]
        return before + between.join(texts) + after

    return write


def gemma(mark: str, close: str, quote: str) -> Any:
    def write(calls: list[tuple[str, dict[str, Any]]]) -> str:
        def one(value: object) -> str:
            return f"{quote}{value}{quote}" if isinstance(value, str) else js(value)

        texts = [
            f"{mark}call:{name}{{{','.join(f'{k}:{one(v)}' for k, v in given.items())}}}{close}"
            for name, given in calls
        ]
        return "".join(texts)

    return write


def python(before: str, after: str) -> Any:
    def write(calls: list[tuple[str, dict[str, Any]]]) -> str:
        texts = [f"{name}({', '.join(f'{k}={js(v)}' for k, v in given.items())})" for name, given in calls]
        return before + ", ".join(texts) + after

    return write


DSML = "｜DSML｜"
DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>%<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
KIMI_ID = "<|tool_call_begin|>functions.%:%i<|tool_call_argument_begin|>"
HARMONY_HEAD = "<|channel|>commentary to=functions.% <|constrain|>json<|message|>"


def function_tags(open_: str, close: str, line: str) -> Any:
    head = f"{open_}\n<function=%>\n" if open_ else "<function=%>\n"
    tail = f"</function>\n{close}" if close else "</function>"
    return in_tags(head, f"<parameter=%>{line}", f"{line}</parameter>\n", tail)


def dsml(block: str) -> Any:
    key = f'<{DSML}parameter name="%" string="'
    return in_tags(
        f'<{DSML}{block}>\n<{DSML}invoke name="%">\n', f'{key}true">', f"</{DSML}parameter>\n",
        f"</{DSML}invoke>\n</{DSML}{block}>", other=f'{key}false">',
    )  # fmt: skip


# format -> how it writes calls
WRITERS: dict[str, Any] = {
    "granite": in_object("<|tool_call|>[", ", ", "]"),
    "nemotron": in_object("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "tool_calls": in_object("<tool_calls>[", ", ", "]</tool_calls>"),
    "llama3_json": in_object("", "; ", "", head="parameters"),
    "mistral": named("", "[TOOL_CALLS]%[ARGS]", "", ""),
    "deepseek_v3": named(*DEEPSEEK),
    "kimi_k2": named("<|tool_calls_section_begin|>", KIMI_ID, "<|tool_call_end|>", "<|tool_calls_section_end|>"),
    "harmony": named("", HARMONY_HEAD, "", ""),
    "qwen3_coder": function_tags("<tool_call>", "</tool_call>", "\n"),
    "functionary": in_tags("<function=%>\n", "<parameter=%>", "</parameter>\n", "</function>"),
    "seed_oss": function_tags("<seed:tool_call>", "</seed:tool_call>", ""),
    "glm": in_tags("<tool_call>%\n", "<arg_key>%</arg_key><arg_value>", "</arg_value>\n", "</tool_call>"),
    "minimax_m2": in_tags(
        '<minimax:tool_call>\n<invoke name="%">\n', '<parameter name="%">', "</parameter>\n",
        "</invoke>\n</minimax:tool_call>",
    ),
    "minicpm": in_tags('<function name="%">\n', '<param name="%">', "</param>\n", "</function>"),
    "deepseek_v32": dsml("function_calls"),
    "deepseek_v4": dsml("tool_calls"),
    "gemma4": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "pythonic": python("[", "]"),
    "lfm2": python("<|tool_call_start|>[", "]<|tool_call_end|>"),
    "olmo3": python("<function_calls>[", "]</function_calls>"),
}  # fmt: skip
WRITERS["hermes"] = lambda calls: "\n".join(
    f'<tool_call>\n{{"name": {js(name)}, "arguments": {js(given)}}}\n</tool_call>' for name, given in calls
)
KIND_NAMES = [kind.name for kind in KINDS]


def format_of(name: str, *, special: bool) -> tuple[ToolFormat, Tokenizer]:
    """special: the format's marks are special tokens of the vocabulary, as they are in most."""
    kind = next(kind for kind in KINDS if kind.name == name)
    marks = [mark for mark in dict.fromkeys(kind.marks) if mark[-1:] not in ("", "=", '"') and mark != ">"]
    tokenizer = byte_tokenizer(marks if special else [])
    template = "[ARGS]" if name == "mistral" else ""
    return ToolFormat(kind, tokenizer, template), tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", KIND_NAMES)
def test_a_format_writes_its_own_calls_and_no_others(name: str, special: bool) -> None:
    tool_format, tokenizer = format_of(name, special=special)
    structured, new_parser = tool_format.forced(TOOLS, names=["get_weather"], parallel=False)
    grammar = Grammar(structured, tokenizer)
    write = WRITERS[name]
    for given in (GOOD, SHORT):
        text = write([("get_weather", given)])
        assert grammar.accepts(text)
        assert grammar.accepts("\n\n" + text)
        assert not grammar.may_begin(text + write([("get_weather", given)]))
        _, content, calls = every_cut(new_parser, "\n" + text) if given is GOOD else every_cut(new_parser, text)
        assert (content, values(calls)) == ("", [("get_weather", given)])
    for wrong in (
        {**SHORT, "days": 9},
        {**SHORT, "days": "soon"},
        {"days": 3},
        {"city": "x"},
        {"city": "x", "unit": "K", "days": 3},
        {**SHORT, "spot": {"x": "a"}},
        {**SHORT, "more": 1},
    ):
        assert not grammar.accepts(write([("get_weather", wrong)])), wrong
    for wrong_name in ("now", "hidden", "nobody"):
        assert not grammar.accepts(write([(wrong_name, {})]))
    for words in ("", "Hello", " "):
        assert not grammar.accepts(words)


@pytest.mark.parametrize("name", [name for name in KIND_NAMES if name != "harmony"])
def test_several_calls_where_they_are_wanted(name: str) -> None:
    tool_format, tokenizer = format_of(name, special=True)
    structured, new_parser = tool_format.forced(TOOLS, names=["get_weather", "now"], parallel=True)
    grammar = Grammar(structured, tokenizer)
    wanted: list[tuple[str, dict[str, Any]]] = [("get_weather", GOOD), ("now", {}), ("get_weather", SHORT)]
    text = WRITERS[name](wanted)
    assert grammar.accepts(text)
    assert grammar.accepts(WRITERS[name](wanted[:1]))
    _, content, calls = every_cut(new_parser, text)
    assert (content, values(calls)) == ("", wanted)
    assert grammar.accepts(WRITERS[name]([("now", {})] * MAX_CALLS))
    assert not grammar.accepts(WRITERS[name]([("now", {})] * (MAX_CALLS + 1)))
    single, _ = tool_format.forced(TOOLS, names=["get_weather", "now"], parallel=False)
    assert not Grammar(single, tokenizer).accepts(text)


NARROW = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}}, "required": ["a"]}


@pytest.mark.parametrize("name", KIND_NAMES)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (NARROW, {"a": "xx"}, {"a": "y"}),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}},
                "minProperties": 1,
                "additionalProperties": False,
            },
            {"a": 1},
            {},
        ),
        (
            {"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]}}},
            {"a": "xy"},
            {"a": "xyz"},
        ),
    ],
)
def test_a_schema_beyond_the_format_still_holds(name: str, schema: dict[str, Any], good: Any, bad: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    tool_format, tokenizer = format_of(name, special=True)
    structured, new_parser = tool_format.forced(tools, names=["f"], parallel=False)
    grammar = Grammar(structured, tokenizer)
    forms = [WRITERS[name], in_object("[", ", ", "]")]
    accepted = [write([("f", good)]) for write in forms if grammar.accepts(write([("f", good)]))]
    assert len(accepted) == 1
    assert values(every_cut(new_parser, accepted[0])[2]) == [("f", good)]
    assert not any(grammar.accepts(write([("f", bad)])) for write in forms)


def test_without_a_format_calls_are_a_json_array() -> None:
    structured, new_parser = forced(TOOLS, names=["now", "get_weather"], parallel=True)
    grammar = Grammar(structured, byte_tokenizer([]))
    text = in_object("[", ", ", "]")([("get_weather", GOOD), ("now", {})])
    assert grammar.accepts(text)
    assert values(every_cut(new_parser, text)[2]) == [("get_weather", GOOD), ("now", {})]


def test_strings_may_hold_anything_but_the_end() -> None:
    tool_format, tokenizer = format_of("qwen3_coder", special=False)
    structured, new_parser = tool_format.forced(TOOLS, names=["get_weather"], parallel=False)
    given = {**SHORT, "city": "</parameter> <function=x>\n\n{é"}
    text = WRITERS["qwen3_coder"]([("get_weather", given)])
    assert Grammar(structured, tokenizer).accepts(text)
    assert values(every_cut(new_parser, text)[2]) == [("get_weather", given)]


def test_a_name_that_no_format_expects() -> None:
    tools = [{"type": "function", "function": {"name": 'a "b" [c]>'}}]
    for name in KIND_NAMES:
        tool_format, tokenizer = format_of(name, special=True)
        structured, new_parser = tool_format.forced(tools, names=['a "b" [c]>'], parallel=False)
        text = in_object("[", ", ", "]")([('a "b" [c]>', {})])
        assert Grammar(structured, tokenizer).accepts(text)
        assert values(every_cut(new_parser, text)[2]) == [('a "b" [c]>', {})]


def test_parameters_that_are_no_object() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]
    with pytest.raises(InvalidParameter, match="tool f must be a schema of type object"):
        forced(tools, names=["f"], parallel=False)
