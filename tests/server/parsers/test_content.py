"""What of a text is content, for stop strings; and when the arguments of a call are whole."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.parsers.balance import Balance
from server.parsers.base import CallArguments, Content
from server.parsers.content import ContentGate
from server.parsers.formats import KINDS
from server.parsers.schema import Tools
from server.parsers.script import Script
from tests.server.parsers.cuts import TOOLS
from tests.server.parsers.test_forced import WRITERS

BEFORE, AFTER = "I look it up. ", "And that is all."
CALLS = [("get_weather", {"city": "Oslo, I look"}), ("now", {})]
KINDS_BY_NAME = {kind.name: kind for kind in KINDS}
# a bare list can only stand at the beginning; harmony writes its words between marks
MARKED = [name for name in KINDS_BY_NAME if name not in ("llama3_json", "pythonic", "harmony")]


def fresh(name: str) -> Script:
    parser = KINDS_BY_NAME[name].make(Tools(TOOLS))
    assert isinstance(parser, Script)
    return parser


def sifted(name: str, pieces: Iterable[str]) -> tuple[str, str]:
    """(content, the rest)."""
    gate = ContentGate(fresh(name))
    stretches = [stretch for piece in pieces for stretch in gate.feed(piece)] + gate.finish()
    assert "".join(text for text, _ in stretches) == "".join(pieces)
    assert all(text for text, _ in stretches)
    return "".join(text for text, counts in stretches if counts), "".join(t for t, counts in stretches if not counts)


def every_cut(name: str, text: str) -> tuple[str, str]:
    whole = sifted(name, [text])
    assert sifted(name, text) == whole
    dice = random.Random(text)
    for _ in range(20):
        cuts = sorted(dice.sample(range(len(text)), min(len(text), 6)))
        assert sifted(name, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]) == whole
    return whole


@pytest.mark.parametrize("name", MARKED)
def test_calls_are_no_content(name: str) -> None:
    calls = WRITERS[name](CALLS)
    content, rest = every_cut(name, BEFORE + calls + AFTER)
    assert content.startswith(BEFORE)
    assert "Oslo" in rest
    assert "Oslo" not in content
    assert content.split() == (BEFORE + AFTER).split()
    assert every_cut(name, BEFORE + AFTER) == (BEFORE + AFTER, "")


@pytest.mark.parametrize("name", ["llama3_json", "pythonic"])
def test_bare_calls_are_no_content(name: str) -> None:
    calls = WRITERS[name](CALLS)
    assert every_cut(name, calls) == ("", calls)
    assert every_cut(name, BEFORE + calls) == (BEFORE + calls, "")


def test_only_the_bodies_of_harmony_are_content() -> None:
    text = "<|channel|>commentary<|message|>One.<|end|><|start|>assistant<|channel|>final<|message|>Two."
    assert every_cut("harmony", text)[0] == "One.Two."
    assert "Oslo" in every_cut("harmony", WRITERS["harmony"](CALLS[:1]))[1]


@pytest.mark.parametrize("text", ["<tool_call>\n{broken", "<tool_", "a <tool_call> b", '<tool_call>{"name": 1}'])
def test_what_turned_out_to_be_no_call_is_content(text: str) -> None:
    assert every_cut("hermes", text) == (text, "")


def test_what_can_be_no_call_is_not_held_back() -> None:
    gate = ContentGate(fresh("hermes"))
    assert gate.feed("some words <") == [("some words ", True)]
    assert gate.feed("b") == [("<b", True)]
    assert gate.feed("<tool_call>") == []
    assert gate.feed('{"name": "now", ') == [('<tool_call>{"name": "now", ', False)]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\{}[]é'),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='a"\\{'), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(alphabet='a"\\}'), values, max_size=3), st.integers(1, 5), st.booleans())
def test_an_object_is_whole_with_its_last_bracket(value: dict[str, object], size: int, spaced: bool) -> None:
    text = json.dumps(value, indent=1 if spaced else None)
    balance = Balance()
    told = [balance.feed(text[at : at + size]) for at in range(0, len(text), size)]
    assert told == [False] * (len(told) - 1) + [True]


def test_blanks_are_not_whole() -> None:
    balance = Balance()
    assert [balance.feed(text) for text in (" ", "", "5", " ")] == [False, False, True, True]


@pytest.mark.parametrize("name", [name for name in KINDS_BY_NAME if name != "harmony"])
def test_parsers_tell_when_a_call_is_whole(name: str) -> None:
    text = WRITERS[name](CALLS[:1])
    end = text.rindex("I look") + 3
    for pieces in ([text[:end]], text[:end], [text], text):
        parser = fresh(name)
        parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
        last = [part for part in parts if isinstance(part, CallArguments)][-1]
        assert last.is_whole == ("".join(pieces) == text)
        assert not any(isinstance(part, Content) for part in parts)
