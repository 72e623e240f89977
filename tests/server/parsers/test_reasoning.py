from __future__ import annotations

import pytest

from engine.sampling_params import ReasoningMarks
from server.parsers.base import OutputParser
from server.parsers.formats import KINDS
from server.parsers.reasoning import FORMATS, with_reasoning
from server.parsers.schema import Tools
from server.parsers.script import PlainParser
from tests.server.parsers.cuts import TOOLS, Maker, every_cut, values

HERMES = next(kind for kind in KINDS if kind.name == "hermes")
HARMONY = next(kind for kind in KINDS if kind.name == "harmony")


def maker(marks: ReasoningMarks) -> Maker:
    return lambda: with_reasoning(PlainParser(), marks)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("opened", [False, True])
def test_thinking_is_split_off(name: str, opened: bool) -> None:
    marks = FORMATS[name].marks(opened)
    start = "" if opened else marks.start + "\n"
    text = f"{start}Let me\n\nsee < [ </th.\n{marks.end}\n\nThe answer.\n"
    assert every_cut(maker(marks), text) == ("Let me\n\nsee < [ </th.", "The answer.\n", [])


def test_no_thinking_where_no_mark_begins_the_text() -> None:
    marks = ReasoningMarks("<think>", "</think>", opened=False)
    for text in ("Answer <think>no</think>", "<thin", " <thi nk>", "\n\n", ""):
        assert every_cut(maker(marks), text) == ("", text, [])


def test_a_mark_that_the_prompt_has_already_written() -> None:
    marks = ReasoningMarks("<think>", "</think>", opened=True)
    assert every_cut(maker(marks), "<think>\nHm.\n</think>Yes") == ("Hm.", "Yes", [])
    assert every_cut(maker(marks), "\n\n</think>\n\nYes") == ("", "Yes", [])


def test_thinking_that_is_cut_short() -> None:
    marks = ReasoningMarks("<think>", "</think>", opened=False)
    assert every_cut(maker(marks), "<think>Hm.\n</thi") == ("Hm.\n</thi", "", [])


def test_calls_come_after_thinking() -> None:
    marks = ReasoningMarks("<think>", "</think>", opened=False)
    text = (
        '<think>\n<tool_call>{"name": "no"}</tool_call>?\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n'
        "</tool_call>"
    )
    reasoning, content, calls = every_cut(lambda: with_reasoning(HERMES.make(Tools(TOOLS)), marks), text)
    assert reasoning == '<tool_call>{"name": "no"}</tool_call>?'
    assert (content, values(calls)) == ("", [("now", {})])


@pytest.mark.parametrize("wrapped", [False, True])
def test_harmony_thinks_in_a_channel(wrapped: bool) -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.now "
        "<|constrain|>json<|message|>{}<|call|>"
    )

    def make() -> OutputParser:
        inner = HARMONY.make(Tools(TOOLS))
        return with_reasoning(inner, FORMATS["harmony"].marks(False)) if wrapped else inner

    reasoning, content, calls = every_cut(make, text)
    assert (reasoning, content, values(calls)) == ("Hm.", "", [("now", {})])


def test_where_the_thinking_ends() -> None:
    parser = with_reasoning(PlainParser(), ReasoningMarks("<think>", "</think>", opened=True))
    assert parser.is_reasoning
    parser.feed("a</thin")
    assert parser.is_reasoning
    parser.feed("k>")
    assert not parser.is_reasoning


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("assistant\n<think>\n\n</think>\n\n", False),
        ("assistant\n", False),
    ],
)
def test_a_prompt_that_ends_in_thought(prompt: str, is_open: bool) -> None:
    assert FORMATS["think"].is_open(prompt) is is_open
