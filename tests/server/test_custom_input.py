"""A custom tool's input inside its function's arguments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.protocol.custom_input import CustomInput


def found(arguments: str, size: int) -> str:
    reader = CustomInput()
    pieces = [reader.feed(arguments[k : k + size]) for k in range(0, len(arguments), size)]
    return "".join(pieces) + reader.finish()


@given(text=st.text(), size=st.integers(1, 9), ascii_only=st.booleans(), indent=st.sampled_from([None, 2]))
def test_the_input_comes_back_wherever_it_is_cut(text: str, size: int, ascii_only: bool, indent: int | None) -> None:
    assert found(json.dumps({"input": text}, ensure_ascii=ascii_only, indent=indent), size) == text


def test_it_leaves_while_it_comes() -> None:
    reader = CustomInput()
    assert [reader.feed(piece) for piece in ('{"inp', 'ut": "a', "\\", "nb", "\\ud83d", "\\ude00c", '"', "}")] == [
        "", "a", "", "\nb", "", "😀c", "", "",
    ]  # fmt: skip
    assert reader.finish() == ""


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"patch": "x"}', "x"),
        ("just text", "just text"),
        ('{"input": 5}', '{"input": 5}'),
        ('{"a": "x", "input": "y"}', "y"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": "cut', "cut"),
        ('{"input": "cut\\', "cut\\"),
        ('{"input": "odd \\x escape"}', 'odd \\x escape"}'),
        ('{"input": "a\nb"}', "a\nb"),
        ('{"input": "half \\ud83d"}', "half \ufffd"),
        ("", ""),
        ("[" * 5000, "[" * 5000),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_a_model_may_write_instead(arguments: str, text: str, size: int) -> None:
    assert found(arguments, size) == text
