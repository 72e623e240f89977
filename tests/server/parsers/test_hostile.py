"""Long and deep text: the buffer stays short, so each character is looked at a bounded number of times."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest

from server.parsers.base import OutputParser
from server.parsers.formats import KINDS
from server.parsers.reasoning import FORMATS, with_reasoning
from server.parsers.schema import Tools
from server.parsers.script import PlainParser, Script
from tests.server.parsers.cuts import TOOLS, run, told
from tests.server.parsers.samples import SAMPLES

MAX_HELD = 600  # characters: the longest name or header, never the text


def openings() -> Iterator[tuple[str, str]]:
    """(format, text that makes it expect something): every prefix of a sample that ends at a place of interest."""
    for name, text, _, calls in SAMPLES:
        if len(calls) > 1:
            ends = [i for i in range(len(text) + 1) if text[i - 1 : i] in "{[\">:'(" or i == 0]
            yield from ((name, text[:end]) for end in ends[:: max(1, len(ends) // 8)])


@pytest.mark.parametrize("filler", [" ", "x", "\n", "{", "[", '"', "\\", "<", "<|", "</", "'", "(", ",", "🙂", "1"])
@pytest.mark.parametrize("name", [kind.name for kind in KINDS])
def test_nothing_is_held_for_long(name: str, filler: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    for _, opening in [(name, ""), *(each for each in openings() if each[0] == name)]:
        parser = kind.make(Tools(TOOLS))
        assert isinstance(parser, Script)
        parser.feed(opening)
        for _ in range(800):
            parser.feed(filler)
            assert len(parser.reader._text) - parser.reader._at <= MAX_HELD
        parser.finish()


def calls_made(parser: OutputParser, text: str) -> int:
    """Python function calls that it takes to read `text` in single characters."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        for character in text:
            parser.feed(character)
        parser.finish()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, text, _, calls in SAMPLES if len(calls) > 1])
def test_work_grows_with_the_text_and_no_faster(name: str, text: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    once, thrice = (calls_made(kind.make(Tools(TOOLS)), text * n) for n in (5, 15))
    assert thrice < 3.3 * once


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_thinking_is_not_held(name: str) -> None:
    parser = with_reasoning(PlainParser(), FORMATS[name].marks(True))
    for character in itertools.chain("Hm. ", "\n<" * 400):
        parser.feed(character)
        assert len(parser.reader._text) - parser.reader._at <= MAX_HELD


@pytest.mark.parametrize(
    ("name", "opening", "nested"),
    [
        ("pythonic", "[get_weather(spot=", "["),
        ("pythonic", "[get_weather(spot=", "{'a': "),
        ("gemma4", "<|tool_call>call:now{a:", "{b:"),
        ("gemma4", "<|tool_call>call:now{a:", "["),
        ("hermes", '<tool_call>{"name": "now", "arguments": ', "["),
        ("qwen3_coder", "<function=get_weather><parameter=spot>", "["),
        ("glm", "<tool_call>get_weather<arg_key>spot</arg_key><arg_value>", "["),
    ],
)
def test_depth_exhausts_no_stack(name: str, opening: str, nested: str) -> None:
    kind = next(kind for kind in KINDS if kind.name == name)
    text = opening + nested * 20_000
    for end in ("", "</parameter></function>", "</arg_value></tool_call>"):
        _, content, calls = told(run(lambda: kind.make(Tools(TOOLS)), [text + end]))
        assert [called for called, _ in calls] == ["now" if "now" in opening else "get_weather"]
        assert not content.startswith(opening)
